"""A pretended world for the membership: workers that follow the protocol of `paceline.worker.membership.consensus`, and
a head.

Nothing is real but `Membership`. A worker is a generator that yields where it would wait; a scheduler with a seed picks
who goes on and which message arrives, so that channels are first in, first out, each by itself, and in any order among
each other. Faults come between. `World` refuses at once what may never happen (`Broken`): a step committed with two
different results, by somebody who has not all steps before it, or handed over out of place; or by workers that the head
does not reach, when others have begun again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import Any

from paceline.elastic.lease import UnreachableHosts, coordinator_silence_s, lease_s
from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import PREEMPTED, Finish, MembershipView

__all__ = ["Broken", "World"]

Wait = Generator[Callable[[], bool], None, Any]  # yields what it waits for
Result = Hashable
GRACE_S = 5.0


class Broken(AssertionError):
    """A promise was broken."""


class Disrupted(Exception):
    """As in `paceline.comm.group`; `peer` where a connection broke, None where the head has said so."""

    def __init__(self, peer: int | None) -> None:
        self.peer = peer


class Left(Exception):
    """This worker has come to its end, in good order."""


class Overdue(Exception):
    """This worker may not go on without a word of the head, and has killed itself."""


@dataclasses.dataclass(frozen=True)
class Standing:
    position: int | None
    holds_result: bool


class Group:
    """The connections of one generation, as one process sees them: who has put what into which round."""

    def __init__(self, form: MembershipView) -> None:
        self.form = form
        self.joined: dict[int, Worker] = {}
        self.complete: dict[int, int] = {}  # round -> attempt in which the last of its values came
        self.rounds: dict[int, dict[int, Any]] = {}
        self.states: dict[int, Any] = {}  # newcomer -> what was handed over to it


class Worker:
    """One process. `committed` is its state: the results of all steps so far."""

    def __init__(self, world: World, rank: int, *, joins: bool) -> None:
        self.world, self.rank = world, rank
        self.attempt, self.host, self.answered = world.attempt, world.host_of[rank], world.now
        self.decided = world.attempt  # in which all had put what this worker has gathered last
        self.committed: list[Result] = [] if joins else list(world.steps)
        self.position: int | None = None if joins else 0
        self.generation = -1 if joins else 0
        self.group: Group | None = None
        self.round = 0
        self.form: MembershipView | None = None  # the newest that it has heard of
        self.finish: Finish | None = None
        self.holds = False
        self.tells_commit = False
        self.is_dismissed = self.has_saved = False
        self.is_change_due = False  # by the last step's metadata
        self.is_alive = True
        self.is_over = False  # it does nothing with the others any more, and says nothing
        self.is_known_over = self.is_done = False  # the head has heard of that; and has counted it as done
        self.is_stopped = False  # SIGSTOP
        self.is_cut_off = False  # from the head, for ever once it has been given up
        self.inbox: deque[Any] = deque()
        self.outbox: deque[tuple[str, dict[str, Any]]] = deque()
        self.life = self._live(joins=joins)
        self.waits_for: Callable[[], bool] = lambda: True

    # What the scheduler does with it.

    @property
    def can_go_on(self) -> bool:
        return self.is_alive and not self.is_stopped and self.waits_for()

    def go_on(self) -> None:
        try:
            self.waits_for = next(self.life)
        except Overdue:
            self.is_alive = False
        except (Left, StopIteration):
            if self.is_over:
                self.end()
            else:
                self.be_over()

    def be_over(self) -> None:
        """What its program does behind the training takes a while."""
        self.is_over = True
        self.tell("over")
        until = self.world.now + self.world.random.choice([0.0, 3.0, 40.0])
        self.waits_for = lambda: self.world.now >= until

    def end(self) -> None:
        self.is_alive = False
        self.tell("exited", has_saved=self.has_saved)

    def hear(self, message: Any) -> None:
        if isinstance(message, MembershipView):
            self.form = message
        else:
            self.finish = message

    def tell(self, op: str, **fields: Any) -> None:
        self.outbox.append((op, fields))

    @property
    def is_overdue(self) -> bool:
        """Whether it may not go on without a word of the head."""
        return self.world.now >= self.answered + lease_s(self.world.limits.silence_s, GRACE_S)

    def miss_the_head(self) -> None:
        """Its supervisor has noticed that the head says nothing: it is to save and leave. Then its time is over."""
        if self.world.now >= self.answered + coordinator_silence_s(self.world.limits.silence_s):
            self.finish = self.finish or Finish(exit_code=PREEMPTED, reason="the head was lost")
        if self.is_overdue:
            self.is_alive = False

    # What it does.

    def _live(self, *, joins: bool) -> Wait:
        if joins:
            self.tell("ready", generation=-1)
            yield from self._regroup(agreed=True, holds_result=False)
        else:
            try:
                yield from self._join(
                    MembershipView(generation=0, members=self.world.first, planned=False, holds=False, reason="")
                )
                self.tell("formed", generation=0)
            except Disrupted as disruption:
                self._say_stuck(disruption)
                yield from self._regroup(agreed=False, holds_result=False)
        while len(self.committed) < self.world.last_step:
            yield from self._between_steps()
            yield from self._step()
        yield from self._run(lambda: self._gather("settle"))

    def _step(self) -> Wait:
        """As many passes as the program has for each step; the last one's result is committed."""
        number = len(self.committed)
        wish = False
        result: Result = None
        for pass_number in range(self.world.passes):
            while True:
                wants = self.finish is not None or self._planned() is not None
                try:
                    shares = yield from self._gather(("walk", number, pass_number, self.position, wants), same=4)
                except Disrupted as disruption:
                    self._say_stuck(disruption)
                    yield from self._regroup(agreed=False, holds_result=False)
                else:
                    result = (number, self.attempt, self.generation, self.round)
                    wish = any(share[4] for share in shares.values())
                    if (yield from self._vote()):
                        break
                if pass_number == 0:
                    yield from self._hold()
        self.is_change_due = wish
        self.world.commit(self, number, result)
        self.committed.append(result)
        if self.tells_commit:
            self.tells_commit = False
            self.tell("committed")

    def _between_steps(self) -> Wait:
        if self.is_change_due:
            self.is_change_due = False
            yield from self._change()
        yield from self._hold()

    def _change(self) -> Wait:
        """What all know, all do: the decision depends on nothing but what was gathered."""
        known = set((yield from self._run(self._what_is_known)).values())
        if all(finishes for finishes, _ in known):
            yield from self._save_and_leave()
        generations = {generation for _, generation in known}
        if len(generations) == 1 and self.generation < max(generations):
            yield from self._regroup(agreed=True, holds_result=False)

    def _what_is_known(self) -> Wait:
        planned = self._planned()
        known = yield from self._gather((self.finish is not None, planned.generation if planned is not None else 0))
        agreed = planned is not None and {generation for _, generation in known.values()} == {planned.generation}
        if agreed and planned is not None and self.rank not in planned.members:
            self.is_dismissed = True  # once it has voted, the others may go on without it
        return known

    def _hold(self) -> Wait:
        while self.holds:
            yield lambda: self.finish is not None or self._newer() is not None
            if self._newer() is None:
                self.holds = False
                yield from self._save_and_leave()
            yield from self._regroup(agreed=True, holds_result=False)

    def _save_and_leave(self) -> Wait:
        self.holds = False
        yield from self._run(lambda: self._gather("save"))
        self.has_saved = True
        self.world.saved = max(self.world.saved, len(self.committed))
        raise Left

    def _run(self, operation: Callable[[], Wait]) -> Wait:
        while True:
            try:
                value = yield from operation()
            except Disrupted as disruption:
                self._say_stuck(disruption)
                yield from self._regroup(agreed=False, holds_result=False)
                continue
            if (yield from self._vote()):
                return value

    def _vote(self) -> Wait:
        try:
            yield from self._gather("vote")
        except Disrupted as disruption:
            self._say_stuck(disruption)
            if not (yield from self._regroup(agreed=False, holds_result=True)):
                return False
        if self.is_overdue:
            raise Overdue
        if self.position is not None:
            self.position += 1
        return True

    def _regroup(self, *, agreed: bool, holds_result: bool) -> Wait:
        while True:
            yield lambda: self._acceptable(agreed) is not None
            form = self._acceptable(agreed)
            if form is None:
                raise Broken("a form has gone")
            if self.is_dismissed:
                raise Left
            if self.rank not in form.members or (self.position is None and not form.planned):
                if self.position is not None:
                    raise Left
                self.generation = form.generation
                self.tell("ready", generation=form.generation)
                continue
            try:
                yield from self._join(form)
                stands = yield from self._gather(Standing(self.position, holds_result))
                is_done = self._is_done(stands, holds_result)
                yield from self._hand_over(stands, is_done)
            except Disrupted as disruption:
                self.generation = form.generation
                self._say_stuck(disruption)
                continue
            break
        self.holds, self.tells_commit = form.holds, True
        self.tell("formed", generation=form.generation)
        return is_done

    def _is_done(self, stands: dict[int, Standing], holds_result: bool) -> bool:
        if self.position is None:
            return False
        positions = {stand.position for stand in stands.values() if stand.position is not None}
        if max(positions) > self.position:
            if not holds_result or max(positions) > self.position + 1:
                raise Broken(f"worker {self.rank} at {self.position} has missed something: {stands}")
            return True
        return all(stand.holds_result for stand in stands.values() if stand.position == self.position)

    def _hand_over(self, stands: dict[int, Standing], is_done: bool) -> Wait:
        newcomers = [rank for rank, stand in stands.items() if stand.position is None]
        if not newcomers:
            return
        newest = max(stand.position for stand in stands.values() if stand.position is not None)
        source = next(rank for rank in sorted(stands) if stands[rank].position == newest)
        group = self._current()
        if self.rank == source:
            for rank in newcomers:
                group.states[rank] = (newest + is_done, list(self.committed))
                yield lambda: True  # it may be lost in between
        elif self.position is None:
            yield from self._transfer(lambda: self.rank in group.states, lambda: {source})
            self.position, committed = group.states[self.rank]
            self.committed = list(committed)

    # What it knows.

    def _newer(self) -> MembershipView | None:
        return self.form if self.form is not None and self.form.generation > self.generation else None

    def _planned(self) -> MembershipView | None:
        form = self._newer()
        return form if form is not None and form.planned else None

    def _acceptable(self, agreed: bool) -> MembershipView | None:
        form = self._newer()
        return form if form is not None and (agreed or form.interrupts(self.generation)) else None

    def _say_stuck(self, disruption: Disrupted) -> None:
        if disruption.peer is not None:
            self.tell("stuck", generation=self.generation, peer=disruption.peer)

    # How things move.

    def _current(self) -> Group:
        if self.group is None:
            raise Broken(f"worker {self.rank} is in no group")
        return self.group

    def _join(self, form: MembershipView) -> Wait:
        """Meet the others of a generation; a newer one of any kind ends that."""
        group = self.world.group(form, self.attempt)
        group.joined[self.rank] = self
        self.group, self.generation, self.round = group, form.generation, 0
        yield from self._gather("meet", meeting=True)

    def _gather(self, value: Any, *, meeting: bool = False, same: int = 0) -> Wait:
        """All members' values. Some of the members may get them and others not."""
        group = self._current()
        self.round += 1
        values = group.rounds.setdefault(self.round, {})
        values[self.rank] = value
        members = group.form.members
        if len(values) == len(members):
            group.complete[self.round] = self.world.attempt
        yield from self._transfer(
            lambda: len(values) == len(members), lambda: set(members) - values.keys(), meeting=meeting
        )
        self.decided = group.complete[self.round]
        if same and len({one[:same] for one in values.values()}) > 1:
            raise Broken(f"members do different things: {values}")
        if len({type(one) for one in values.values()}) > 1:
            raise Broken(f"members do different things: {values}")
        return dict(values)

    def _transfer(
        self, is_there: Callable[[], bool], missing: Callable[[], set[int]], *, meeting: bool = False
    ) -> Wait:
        group, world = self._current(), self.world
        generation = group.form.generation

        def is_over() -> bool:
            form = self.form
            if form is None or form.generation <= generation:
                return False
            return meeting or form.interrupts(generation)

        def broken_to() -> int | None:
            cut = next((rank for rank in group.form.members if world.is_cut(self.rank, rank, generation)), None)
            if cut is not None:
                return cut
            if not world.notices_gone:
                return None
            return next((rank for rank in sorted(missing()) if world.has_gone(rank, group, self.attempt)), None)

        yield lambda: is_there() or is_over() or broken_to() is not None
        # Whatever came first: a transfer may end well although it is over already, and the other way round.
        peer = broken_to()
        chances = [
            *([None] if is_there() and not world.is_cut_any(self.rank, group) else []),
            *([-1] if is_over() else []),
        ]
        if peer is not None:
            chances.append(peer)
        chance = world.random.choice(chances)
        if chance is not None:
            raise Disrupted(None if chance == -1 else chance)


class World:
    """The head, the workers, what is between them, and what may never happen."""

    def __init__(
        self,
        limits: Limits,
        *,
        replicas: int,
        seed: int,
        passes: int = 1,
        notices_gone: bool = True,
        last_step: int = 10**9,
        begins_again: bool = False,
    ) -> None:
        """`begins_again`: where nobody is left who could go on, all begin again with a snapshot. Each worker is on a
        host of its own then."""
        self.random = random.Random(seed)
        self.limits, self.passes, self.notices_gone, self.last_step = limits, passes, notices_gone, last_step
        self.replicas, self.begins_again, self.attempt = replicas, begins_again, 0
        self.now = 0.0
        self.steps: list[Result] = []  # what the whole run has committed
        self._hosts = itertools.count()
        self.host_of: dict[int, int] = {}
        self.newest: dict[tuple[int, int], Worker] = {}  # of each attempt and rank
        self.workers: dict[int, Worker] = {}
        self._begin()
        self.past: list[Worker] = []  # given up, but maybe alive
        self.groups: dict[tuple[int, int], Group] = {}  # by attempt and generation
        self.cut_links: dict[frozenset[int], int] = {}  # the newest generation whose connections are cut
        self.saved = -1
        self.given_up = ""
        self.num_killed = 0
        self._starting: dict[int, float] = {}
        self.decisions: list[Decision] = []

    # What may never happen.

    def commit(self, worker: Worker, number: int, result: Result) -> None:
        """A worker commits a step: it is the next one, with everybody's result, and after the same steps.

        Where others have begun again, they had not when the last vote was cast; a worker that stood still since may
        write it down when it wakes.
        """
        if worker.decided != worker.attempt:
            raise Broken(
                f"worker {worker.rank} of attempt {worker.attempt} commits step {number}, for which votes were cast "
                f"when attempt {worker.decided} had begun"
            )
        if worker.attempt != self.attempt:
            return
        if len(self.steps) == number:
            self.steps.append(result)
        if number > len(self.steps) or self.steps[number] != result or worker.committed != self.steps[:number]:
            raise Broken(f"worker {worker.rank} commits step {number} as {result}, others {self.steps[number:]}")

    # What is between workers.

    def group(self, form: MembershipView, attempt: int) -> Group:
        group = self.groups.setdefault((attempt, form.generation), Group(form))
        if group.form.members != form.members:
            raise Broken(f"two groups of generation {form.generation}: {group.form} and {form}")
        return group

    def is_cut(self, one: int, other: int, generation: int) -> bool:
        return self.cut_links.get(frozenset({one, other}), -2) >= generation

    def is_cut_any(self, rank: int, group: Group) -> bool:
        return any(self.is_cut(rank, other, group.form.generation) for other in group.form.members)

    def has_gone(self, rank: int, group: Group, attempt: int) -> bool:
        """Whether a member has left this group behind, or was lost."""
        worker = group.joined.get(rank) or self.newest.get((attempt, rank))
        if worker is None or not worker.is_alive or worker.is_over:
            return True
        return worker.group is not None and worker.group.form.generation > group.form.generation

    # The head.

    def do(self, decisions: list[Decision]) -> None:
        told = 0
        if self.membership.target > self.limits.most:
            raise Broken(f"{self.membership.target} replicas are wanted, of at most {self.limits.most}")
        for decision in decisions:
            self.decisions.append(decision)
            match decision:
                case MembershipView():
                    told += 1
                    self._check(decision)
                    self.out_of_reach.told({self.host_of[rank] for rank in decision.members})
                    for rank in {*decision.members, *self.membership.left_out}:
                        self._tell(rank, decision)
                case StartReplica():
                    for rank in decision.workers:
                        self._start(rank)
                case EndWorker():
                    worker = self.workers.get(decision.worker)
                    if worker is not None and (
                        worker.is_done or (worker.is_known_over and "said nothing" in decision.reason)
                    ):
                        raise Broken(f"{decision}, though its program is at its end")
                    self._end(decision.worker)
                case Finish():
                    for rank in self.membership.workers:
                        self._tell(rank, decision)
                case GiveUp():
                    self.given_up = decision.reason
                    there = {rank: one for rank, one in self.workers.items() if one.is_alive and not one.is_over}
                    having = {rank for rank, one in there.items() if one.position is not None}
                    having -= self.membership.left_out  # told to leave: others may have gone on without them
                    each = self.limits.workers_each
                    if any(having.issuperset(range(rank - rank % each, rank - rank % each + each)) for rank in having):
                        raise Broken(f"given up, though workers {having} have the state: {decision}\n{self.describe()}")
        if told > 1:
            raise Broken(f"two generations at once: {decisions}")

    def _check(self, form: MembershipView) -> None:
        if not form.members:
            raise Broken(f"a generation of nobody: {form}")
        known = set(self.membership.workers)
        if not known.issuperset(form.members):
            raise Broken(f"a generation of workers that are gone: {form}, {known}")

    def _start(self, rank: int) -> None:
        if rank in self._starting or (rank in self.workers and self.workers[rank].is_alive):
            raise Broken(f"worker {rank} is started twice")
        self._starting[rank] = self.now + self.random.choice([0.1, 1.0, 3.0])
        self.host_of[rank] = next(self._hosts)

    def _end(self, rank: int) -> None:
        self._starting.pop(rank, None)
        worker = self.workers.pop(rank, None)
        if worker is None:
            return
        self.num_killed += 1
        if not worker.is_cut_off:
            worker.is_alive = False
        else:
            self._lose_sight(worker)
        worker.is_cut_off = True
        self.past.append(worker)

    def _tell(self, rank: int, message: Any) -> None:
        if rank in self.workers:
            self.workers[rank].inbox.append(message)

    def _serve(self, rank: int, op: str, fields: dict[str, Any]) -> None:
        membership = self.membership
        match op:
            case "ready":
                self.do(membership.ready(rank, self.now, **fields))
            case "formed":
                self.do(membership.formed(rank, now=self.now, **fields))
                if membership.is_formed:
                    self.out_of_reach.formed()
            case "committed":
                membership.committed(rank, self.now)
            case "stuck":
                self.do(membership.stuck(rank, now=self.now, **fields))
            case "leaving":
                self.do(membership.leaving(rank, self.now))
            case "over":
                self.do(membership.over(rank, self.now))
                self.workers[rank].is_known_over, self.workers[rank].is_done = True, membership.is_over(rank)
            case "killed":
                if not self.workers.pop(rank).is_done:
                    self.do(membership.lost([rank], self.now, reason=f"worker {rank} was killed"))
            case "exited":
                if not self.workers.pop(rank).is_done:
                    self.do(membership.ended(rank, self.now, **fields))
            case _:
                raise Broken(f"unknown notice {op}")

    # What happens.

    def turn(self) -> bool:
        """One thing happens, of all that may; False where nothing can but the passing of time."""
        if self.given_up and self.begins_again:
            self._end_all()
        chances: list[Callable[[], None]] = []
        for rank, worker in self.workers.items():
            if worker.can_go_on:
                chances.append(worker.go_on)
            if worker.is_cut_off:
                continue
            if worker.inbox and worker.is_alive and not worker.is_stopped:
                chances.append(lambda worker=worker: worker.hear(worker.inbox.popleft()))
            if worker.outbox:
                chances.append(lambda rank=rank, worker=worker: self._deliver(rank, worker))
        chances += [worker.go_on for worker in self.past if worker.can_go_on]
        if not chances or (self.given_up and not self.begins_again):
            return False
        self.random.choice(chances)()
        return True

    def _deliver(self, rank: int, worker: Worker) -> None:
        op, fields = worker.outbox.popleft()
        self._serve(rank, op, fields)

    def pass_time(self, seconds: float = 0.5) -> None:
        """The clock goes on: workers say that they are alive, and the head looks."""
        self.now += seconds
        if self.given_up and self.begins_again:
            self._end_all()
        for rank in [rank for rank, due in self._starting.items() if due <= self.now]:
            del self._starting[rank]
            self._add(Worker(self, rank, joins=True))
        for rank in [rank for rank, one in self.workers.items() if one.is_cut_off and one.is_known_over]:
            self.lose_host(rank, room=1)  # whose silence is all there is to be heard of such a worker
        for rank, worker in self.workers.items():
            if worker.is_alive and not (worker.is_stopped or worker.is_cut_off or worker.is_over):
                self.membership.heard(rank, self.now)
        for worker in [*self.workers.values(), *self.past]:
            if not worker.is_cut_off:
                worker.answered = self.now
            elif worker.is_alive and not worker.is_stopped:
                worker.miss_the_head()
        if not self.given_up:
            self.do(self.membership.tick(self.now))
        elif self.begins_again and self.now >= self.out_of_reach.busy_until():
            self._begin_again()

    def _begin(self) -> None:
        """All workers of an attempt begin after the same steps."""
        self.membership = Membership(self.limits, replicas=self.replicas, now=self.now)
        self.first = self.membership.view.members
        self.host_of = {rank: next(self._hosts) for rank in self.first}
        self.out_of_reach = UnreachableHosts(self.host_of.values())
        for rank in self.first:
            self._add(Worker(self, rank, joins=False))

    def _add(self, worker: Worker) -> None:
        self.workers[worker.rank] = self.newest[worker.attempt, worker.rank] = worker

    def _end_all(self) -> None:
        """Nobody is left who could go on: all are ended that the head reaches."""
        self._starting.clear()
        for rank in tuple(self.workers):
            self._end(rank)

    def _lose_sight(self, worker: Worker) -> None:
        gone_by = worker.answered + lease_s(self.limits.silence_s, GRACE_S)  # in a world with one clock
        self.out_of_reach.lost(worker.host, gone_by=gone_by)

    def _begin_again(self) -> None:
        """From a snapshot: of any step."""
        self._end_all()
        self.given_up, self.cut_links = "", {}
        self.attempt += 1
        del self.steps[self.random.randint(0, len(self.steps)) :]
        self._begin()

    def run(self, turns: int) -> None:
        """So many things happen; time passes where nothing else does, and now and then."""
        for _ in range(turns):
            if self.is_ended:
                return
            self._go_on()

    def _go_on(self) -> None:
        if not self.turn() or self.random.random() < (0.05 if self.given_up else 0.005):
            self.pass_time()

    @property
    def is_ended(self) -> bool:
        """Whether nobody is left who will do anything."""
        return not self.begins_again if self.given_up else not (self.workers or self._starting)

    def go_on_until(self, is_reached: Callable[[], bool], *, turns: int = 20_000, seconds: float = 900.0) -> None:
        """Let things happen; Broken where it is not reached."""
        until = self.now + seconds
        for _ in range(turns):
            if is_reached():
                return
            if self.now > until:
                break
            self._go_on()
        raise Broken(f"nothing goes on any more at {self.now:.0f} s: {self.describe()}")

    def describe(self) -> str:
        """The state of everything, for readers of a failed test."""
        lines = [str(self.membership.view), *(f"  {name}: {value}" for name, value in vars(self.membership).items())]
        for rank, worker in self.workers.items():
            lines.append(
                f"  worker {rank}: alive {worker.is_alive} stopped {worker.is_stopped} generation {worker.generation} "
                f"position {worker.position} steps {len(worker.committed)} holds {worker.holds} form {worker.form} "
                f"inbox {list(worker.inbox)} outbox {list(worker.outbox)}"
            )
        return "\n".join([*lines, f"starting {self._starting}", f"steps {len(self.steps)} saved {self.saved}"])

    # Faults.

    def kill(self, *ranks: int, loses_words: bool = False) -> None:
        """SIGKILL; what they have said may be lost with them."""
        for rank in ranks:
            worker = self.workers.get(rank)
            if worker is None or not worker.is_alive:
                continue
            worker.is_alive = False
            self.num_killed += 1
            if loses_words:
                worker.outbox.clear()
            worker.tell("killed")

    def cut_off(self, rank: int) -> None:
        """Its host cannot reach the head any more, though it reaches the other workers."""
        if rank in self.workers:
            self.workers[rank].is_cut_off = True

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        if rank in self.workers:
            self.workers[rank].is_stopped = True

    def wake_all(self) -> None:
        """Stopped workers go on, also those that were given up meanwhile where no kill reached them."""
        for worker in [*self.workers.values(), *self.past]:
            worker.is_stopped = False

    def ask_to_leave(self, rank: int) -> None:
        """SIGTERM."""
        if rank in self.workers and self.workers[rank].is_alive:
            self.workers[rank].tell("leaving")

    def ask_host_to_leave(self, *ranks: int, room: int) -> None:
        """A host is to go, with these workers; the other hosts have room for so many replicas."""
        target = self.membership.target
        self.do(self.membership.leave(ranks, self.now, reason="host to go", room=room))
        if self.membership.target > target:
            raise Broken(f"{ranks} leave, and the run wants {self.membership.target} replicas, instead of {target}")

    def cut_link(self, one: int, other: int, *, for_good: bool) -> None:
        """Two workers lose their connection; for good: new ones do not come about either."""
        self.cut_links[frozenset({one, other})] = 10**9 if for_good else self.membership.generation

    def mend_links(self) -> None:
        """New connections come about again; those that were cut stay so."""
        for link in self.cut_links:
            self.cut_links[link] = min(self.cut_links[link], self.membership.generation)

    def lose_host(self, *ranks: int, room: int) -> None:
        """The head loses a host with these workers; the other hosts have room for so many replicas."""
        gone = [rank for rank in ranks if rank in self.workers or rank in self._starting]
        lost = [rank for rank in gone if rank in self._starting or not self.workers[rank].is_done]
        for rank in gone:
            if rank in self.workers:
                self.workers[rank].is_cut_off |= self.random.random() < 0.5  # otherwise it is lost with its host
                self._lose_sight(self.workers[rank])
            self._end(rank)
        target = self.membership.target
        self.do(self.membership.lost(lost, self.now, reason="host gone", room=room))
        if self.membership.target > target:
            raise Broken(
                f"the loss of {ranks} made the run want {self.membership.target} replicas, instead of {target}"
            )

    def grow(self, replicas: int) -> None:
        """A host comes with room for so many."""
        self.do(self.membership.grow(replicas, self.now))

    def resize(self, replicas: int) -> None:
        """`paceline resize`; refused where it is too few or too many, or too late."""
        if self.limits.least <= replicas <= self.limits.most and self.membership.ending is None:
            with contextlib.suppress(ValueError):  # the program is at its end
                self.do(self.membership.resize(replicas, self.now))

    def finish(self) -> None:
        """The whole job is asked to leave."""
        self.do(self.membership.finish(75, "asked"))
