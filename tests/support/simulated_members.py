"""Pretended workers that follow the protocol of `paceline.worker.membership.consensus`, in a pretended world.

A worker is a generator that yields where it would wait. `membership_simulation.World` picks who goes on.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import TYPE_CHECKING, Any

from paceline.elastic.lease import coordinator_silence_s, lease_s
from paceline.elastic.membership_messages import PREEMPTED, Finish, MembershipView

if TYPE_CHECKING:
    from membership_simulation import World

__all__ = ["GRACE_S", "Broken", "Group", "Result", "Worker"]

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
    """The connections of one generation, as one process sees them, and the rounds to which each has brought data."""

    def __init__(self, form: MembershipView) -> None:
        self.form = form
        self.joined: dict[int, Worker] = {}
        self.put: dict[int, dict[int, int]] = {}  # round -> rank -> attempt in which its value came
        self.rounds: dict[int, dict[int, Any]] = {}
        self.states: dict[int, Any] = {}  # newcomer -> what was handed over to it


class Worker:
    """One process. `committed` is its state: the results of all steps so far."""

    def __init__(self, world: World, rank: int, *, joins: bool) -> None:
        self.world, self.rank, self.is_newcomer = world, rank, joins
        self.attempt, self.host, self.answered = world.attempt, world.host_of[rank], world.now
        # The attempts in which all others, and the first of them, had put what this worker has gathered last.
        self.decided = self.first_put = world.attempt
        self.num_late = 0  # steps that it has committed after others had begun again
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
        put = group.put.setdefault(self.round, {})
        put[self.rank] = self.world.attempt
        yield from self._transfer(
            lambda: len(values) == len(members), lambda: set(members) - values.keys(), meeting=meeting
        )
        others = [put[rank] for rank in members if rank != self.rank] or [put[self.rank]]
        self.decided, self.first_put = max(others), min(others)
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
