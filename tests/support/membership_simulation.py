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
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

from paceline.elastic.lease import UnreachableHosts, lease_s
from paceline.elastic.membership import Decision, EndWorker, GiveUp, Limits, Membership, StartReplica
from paceline.elastic.membership_messages import Finish, MembershipView, WorkerReport
from simulated_members import GRACE_S, Broken, Group, Result, Worker

__all__ = ["World"]


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
        self.reports: dict[Worker, WorkerReport] = {}  # what the agents of their hosts have seen of them
        self.have_ended: dict[int, WorkerReport] = {}  # by rank: of the processes that have ended as planned
        self.told = ""  # what another head could take over
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

        Where others have begun again, they had not when the last vote of another worker was cast; one that stood still
        since, or that the head does not reach, may add its own and write the step down. So may several such workers, to
        the votes of those that have begun again. None of them gets any further.
        """
        worker.num_late += worker.attempt != self.attempt
        if worker.num_late > 1 or (worker.decided != worker.attempt and worker.first_put != worker.attempt):
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
        if any(isinstance(decision, MembershipView) for decision in decisions):
            self.told = json.dumps(self.membership.to_json())
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
        self.have_ended.pop(rank, None)
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
        report = self._report_of(self.workers[rank])
        report.note({"op": op, **fields})
        if op == "exited":
            report.has_ended, report.has_saved = True, fields["has_saved"]
            self.have_ended[rank] = report
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
        self.told, self.have_ended = json.dumps(self.membership.to_json()), {}
        self.first = self.membership.view.members
        self.host_of = {rank: next(self._hosts) for rank in self.first}
        self.out_of_reach = UnreachableHosts(self.host_of.values())
        for rank in self.first:
            self._add(Worker(self, rank, joins=False))

    def _add(self, worker: Worker) -> None:
        self.have_ended.pop(worker.rank, None)
        self.workers[worker.rank] = self.newest[worker.attempt, worker.rank] = worker

    def _report_of(self, worker: Worker) -> WorkerReport:
        return self.reports.setdefault(worker, WorkerReport(is_newcomer=worker.is_newcomer))

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

    def change_head(self, *ranks: int, room: int | None = None) -> None:
        """The head is lost, with the workers `ranks` on its host, and with what was on its way to it and from it;
        another one takes over."""
        for rank in ranks:
            if rank in self.workers:
                self.workers[rank].is_cut_off |= self.random.random() < 0.5  # otherwise it is lost with its host
                self._lose_sight(self.workers[rank])
            self._end(rank)
            self.have_ended.pop(rank, None)
        reports = {rank: WorkerReport(is_newcomer=True) for rank in self._starting} | self.have_ended
        finish: Finish | None = None
        for rank, worker in self.workers.items():
            if worker.is_cut_off:
                continue
            reports[rank] = report = self._report_of(worker)
            for _ in range(self.random.randint(0, len(worker.outbox))):  # it was on its way
                op, fields = worker.outbox[0]
                if op in ("killed", "exited"):
                    break
                report.note({"op": op, **fields})
                worker.outbox.popleft()
            for _ in range(self.random.randint(0, len(worker.inbox))):
                worker.inbox.pop()
            finish = worker.finish or next((one for one in worker.inbox if isinstance(one, Finish)), finish)
        lost = [rank for rank, worker in self.workers.items() if worker.is_cut_off]
        for rank in lost:
            self._lose_sight(self.workers[rank])
            self._end(rank)
        self.membership = Membership.taken_over(self.limits, json.loads(self.told), self.now)
        self.do(self.membership.resume(reports, self.now, reason="the head was lost", room=room))
        if finish is not None and not self.given_up:
            self.do(self.membership.finish(finish.exit_code, finish.reason))
        for rank, worker in self.workers.items():
            worker.is_known_over = worker.is_known_over or reports.get(rank, WorkerReport()).is_over
            worker.is_done = self.membership.is_over(rank)

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
