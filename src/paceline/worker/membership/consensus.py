"""Commits each operation of an elastic run on all members or on none, through lost members and newcomers.

Everything that all workers take part in (a gradient pass over a batch, an evaluation, a gather) is an *operation*. In
an elastic run each ends with a vote: a member that has the result waits until all members have it. When a member is
lost before that, the others *regroup*: they form the next generation and compare their progress. If any member has got
past the vote, or all of them hold the result, it counts everywhere; otherwise it is discarded and done again. So two
members are never more than one operation apart, and never disagree about whether a step was committed.

The workers of one replica act as one: in each operation they compare what has failed
(`paceline.comm.elastic.lockstep_group`), so they abandon it together. A replica has formed a generation when each of
its workers has. A newcomer gets its state from a member, between two steps.

With asynchronous updates, parameter servers hand out the batches, and workers are *detached* inside the loop. A lost
or new member then delays no other one, and nothing is done again. The members come together, in the newest generation,
at the end of the loop, and where all are to save and leave. A newcomer has the servers' state by then.

All members may also save, or leave, between two steps: by the first one's clock, by order of the coordinator, by a
request to one of them where there is none (`PreemptionNotice`), or after a lost supervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

import torch

from paceline import clock
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.elastic.lockstep_group import Lockstep
from paceline.comm.group import Disrupted
from paceline.elastic.membership_messages import PREEMPTED, Finish, MembershipView
from paceline.errors import SyncError
from paceline.worker.membership.clean_exit import CleanExit
from paceline.worker.membership.coordinator_client import CoordinatorClient
from paceline.worker.membership.generation_builder import ElasticMembership
from paceline.worker.membership.preemption import PreemptionNotice
from paceline.worker.membership.state_transfer import MemberProgress, StateHolder, operation_counts, transfer_state

__all__ = ["Consensus", "RunTogether"]

T = TypeVar("T")

END_S = 3.0  # within which the coordinator has noticed a lost worker, and ended its replica


class RunTogether(Protocol):
    """How an operation of all members is done: `Consensus.run`."""

    def __call__(self, operation: Callable[[], T]) -> T: ...


class Consensus:
    """Does operations for one worker; without `elastic` they are simply done, and a lost member is an error.

    Where there is no `coordinator`, `notice` receives the requests to leave that reach this worker alone."""

    def __init__(
        self,
        members: ElasticGroup,
        *,
        rank: int,
        coordinator: CoordinatorClient | None,
        notice: PreemptionNotice | None = None,
        timeout_s: float,
        elastic: ElasticMembership | None = None,
    ) -> None:
        self.elastic = elastic
        self._lockstep = Lockstep() if elastic is None else elastic.lockstep
        self.holds = False  # too few members to take steps
        self.is_behind = False  # when this generation formed, others had taken a step that this worker had not
        self.recovery_s = 0.0  # that changes of the members have cost this worker: discarded work, regrouping
        self._holder: StateHolder | None = None
        self.rank = rank  # in the whole run
        self._members, self._coordinator, self._timeout_s = members, coordinator, timeout_s
        self._notice = notice
        self._position: int | None = None  # operations that were completed; None: a newcomer
        self._is_change_due = False
        self._reports_commit = False
        self._is_dismissed = False  # all members go on without this worker
        self._before_operation: Callable[[], None] = lambda: None
        self._is_detached = False
        self._has_joined_detached = False  # a newcomer that became a member without another member's state
        self._num_undone = 0  # steps that a program has undone by itself since the present generation began

    def attach(self, holder: StateHolder) -> None:
        """Set the owner of the run's state on this worker."""
        self._holder = holder
        if self._coordinator is not None:
            self._coordinator.step = lambda: holder.step

    @property
    def generation(self) -> int:
        """The number of the present generation; a fixed number of replicas has only one."""
        return self._members.generation

    def check(self) -> None:
        """Raise Disrupted where the present generation is over, though no transfer has failed."""
        if self.elastic is not None and self._coordinator is not None:
            self._coordinator.check(self._members.generation)

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker started later than the run, and is not a member yet."""
        return self._members.is_newcomer

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the present members, by their index in the group."""
        return self._members.ranks

    def begin(self, members: tuple[int, ...]) -> None:
        """Join the run's first generation, or the one that has replaced it meanwhile."""
        self._position = 0
        view = MembershipView(generation=0, members=members, planned=False, holds=False, reason="the run begins")
        elastic, coordinator = self.elastic, self._coordinator
        if elastic is None or coordinator is None:
            return
        try:
            self._members.take(elastic.build(view, False), 0, ranks=members)
            has_formed = True
        except Disrupted:
            self._members.generation, has_formed = 0, False
        if elastic.has_formed(0, has_formed):
            coordinator.tell("formed", generation=0, noticed=clock.now(), since_s=0.0)
        else:
            self._regroup(coordinator, elastic, holds_result=False)

    def before_each_operation(self, before_operation: Callable[[], None]) -> None:
        """Have a function called before each operation: replicas that take steps alone meet in it."""
        self._before_operation = before_operation

    def run(self, operation: Callable[[], T]) -> T:
        """Do an operation to its end, through as many generations as it takes; newcomers leave it out."""
        self._before_operation()
        self.rejoin_group()
        return self.do(operation)

    def do(self, operation: Callable[[], T]) -> T:
        """The same for replicas that have met already: nothing is called before it."""
        while True:
            began = time.perf_counter()
            try:
                value = operation()
            except Disrupted as disruption:
                if self.elastic is None:
                    raise
                self.drop(disruption)
            except Exception:
                disruption = self._aborted()
                if disruption is None:
                    raise
                self.drop(disruption)
            else:
                if self.vote():
                    return value
            self.recovery_s += time.perf_counter() - began

    def detach(self) -> None:
        """From now on this worker works alone: no collective waits for the others."""
        self._members.detach(self.rank)
        if self.elastic is not None and self._coordinator is not None:
            self._is_detached = True
            self._coordinator.detach()

    def join_detached(self) -> None:
        """Make this newcomer a member, without a state from the others. Raises CleanExit where the run ends."""
        finish = self._needed()[0].join_detached()
        if finish is not None:
            raise CleanExit(finish.exit_code)
        self._has_joined_detached = True

    def await_run_end(self) -> NoReturn:
        """Wait for the end of the run, which this worker joined too late to do anything. Raises CleanExit."""
        coordinator = self._needed()[0]
        while (finish := coordinator.wait_for_change(coordinator.newest)) is None:
            pass
        raise CleanExit(finish.exit_code)

    def rejoin_group(self) -> None:
        """Take part in the members' operations again, where this worker was detached."""
        self._members.join()
        if self._is_detached and self._coordinator is not None:
            self._is_detached = False
            self._coordinator.join()
            if self.is_newcomer:
                if not self._has_joined_detached:  # all loops that it has seen were over, and the others are past them
                    self.await_run_end()
                self.change_over()

    def await_enough(self) -> None:
        """Where this worker is detached: return when there are enough members, or it has something else to do."""
        if self._is_detached and self._coordinator is not None:
            self._coordinator.await_enough()

    @property
    def is_dismissed(self) -> bool:
        """Whether the others, which are detached, go on without this worker."""
        return self._is_detached and self._coordinator is not None and self._coordinator.is_dismissed

    @property
    def present(self) -> tuple[int, ...]:
        """Where this worker is detached: the ranks of all members by the newest view; none before the first change."""
        return self._coordinator.members if self._is_detached and self._coordinator is not None else ()

    @property
    def has_changed(self) -> bool:
        """Whether the members are, or may be, others than at the beginning of the run."""
        return self.is_newcomer or (self._coordinator is not None and self._coordinator.newest > 0)

    def depart(self) -> NoReturn:
        """Leave the run to the others. Raises CleanExit."""
        self._depart(self._needed()[0])

    def vote(self) -> bool:
        """Wait until all members have the operation's result; False: it is void, and has to be done again."""
        if self.elastic is not None and not self.is_newcomer:
            try:
                self._settle(self.elastic)
            except Disrupted as disruption:  # a sum has failed, or was aborted: there is no result
                self.drop(disruption)
                return False
            try:
                self._members.all_reduce(torch.zeros(1), what="the vote").wait()
            except Disrupted as disruption:
                # Where others of the replica have got past it, all members hold the result, and find that out.
                if not self.drop(disruption, holds_result=True):
                    return False
            if self._coordinator is not None:
                self._coordinator.end_if_overdue()  # this process may have stood still, and others have begun again
        self._position = None if self._position is None else self._position + 1
        return True

    def _settle(self, elastic: ElasticMembership) -> None:
        """Return when all that this worker's replica has begun with others has ended well; otherwise raise Disrupted,
        on all its workers. What was read meanwhile of a device's sums is of no use then."""
        if elastic.cross_replica is not None:
            elastic.cross_replica.settle()  # a failure is kept for the next line
        self._members.settle()

    def _aborted(self) -> Disrupted | None:
        """Why a device's sum was aborted, after an error that may come of the numbers that were read of it. In replicas
        of several workers an error is one worker's, and the others know nothing of it."""
        if self.elastic is None or self.elastic.workers_each > 1 or self.is_newcomer:
            return None
        try:
            self._members.settle()
        except Disrupted as disruption:
            return disruption
        return None

    def drop(self, disruption: Disrupted, *, holds_result: bool = False) -> bool:
        """Abandon the present operation, with all workers of this replica, and form the next generation. Returns
        whether the operation counts as done. Raises CleanExit where this worker is not in that generation."""
        coordinator, elastic = self._needed()
        self._lockstep.abort(disruption)
        return self._regroup(coordinator, elastic, holds_result=holds_result)

    def change_over(self) -> None:
        """Form the next generation between two steps, as all members of this one do. Raises CleanExit as `drop`."""
        self._regroup(*self._needed(), holds_result=False, is_between_steps=True)

    def _needed(self) -> tuple[CoordinatorClient, ElasticMembership]:
        if self._coordinator is None or self.elastic is None:
            raise SyncError("a member was lost, and this run has a fixed number of replicas")
        return self._coordinator, self.elastic

    def _regroup(
        self,
        coordinator: CoordinatorClient,
        elastic: ElasticMembership,
        *,
        holds_result: bool,
        is_between_steps: bool = False,
    ) -> bool:
        members, noticed = self._members, clock.now()
        if not is_between_steps:
            self._report_stuck(coordinator)
        while True:
            if self._is_dismissed:
                self._depart(coordinator)
            view = coordinator.wait_for(
                members.generation, is_between_steps=is_between_steps, timeout_s=self._timeout_s
            )
            is_newcomer = self._position is None and not coordinator.acknowledges
            if is_newcomer and (self.rank not in view.members or not view.planned):
                members.generation = view.generation  # that one is for members that have the state
                coordinator.tell("ready", generation=view.generation)
                continue
            if self.rank not in view.members:
                self._depart(coordinator)
            try:
                is_hurry = not is_newcomer and not coordinator.acknowledges  # others may still run a batch
                members.take(elastic.build(view, is_hurry), view.generation, ranks=view.members)
                progress: list[MemberProgress] = members.meet(MemberProgress(self._position, holds_result, self._step))
                is_done = operation_counts(progress, self._position, holds_result)
                received = transfer_state(
                    members,
                    progress,
                    rank=self.rank,
                    workers_each=elastic.workers_each,
                    holder=self._holder,
                    servers_have_state=coordinator.acknowledges,
                )
            except Disrupted:
                members.generation = max(members.generation, view.generation)
                elastic.has_formed(view.generation, False)
                if not is_newcomer:
                    self._report_stuck(coordinator)
            else:
                if elastic.has_formed(view.generation, True):
                    break
            if is_newcomer:
                coordinator.tell("ready", generation=view.generation)
        if received is not None and self._holder is not None:
            self._position, state = received
            self._holder.fill(state)
        elif self._position is None:
            self._position = 0  # all members are newcomers, and have the servers' state
        self.holds = view.holds
        self.is_behind = any(one.step > self._step for one in progress)
        self._reports_commit = True
        formed = {"generation": view.generation, "noticed": noticed, "since_s": clock.now() - noticed}
        coordinator.tell("formed", **formed, undone=self._num_undone)
        self._num_undone = 0
        if self._holder is not None:
            self._holder.regrouped()
        return is_done

    @staticmethod
    def _depart(coordinator: CoordinatorClient) -> NoReturn:
        """The others go on without this worker."""
        coordinator.tell("left")
        raise CleanExit(0)

    def _report_stuck(self, coordinator: CoordinatorClient) -> None:
        """Report a failed transfer to the coordinator where it has announced no lost worker."""
        if coordinator.newest <= self._members.generation:
            coordinator.tell("stuck", generation=self._members.generation)

    def begin_steps(self, *, keeps: bool = False) -> None:
        """The first loop over batches begins. A newcomer waits until it is a member, and has a member's state then.

        `keeps`: this worker takes memory checkpoints, which outlive it.
        """
        if self._notice is not None:
            self._notice.begin_steps()
        if self._coordinator is None:
            return
        self._coordinator.tell("begun")
        if keeps:
            self._coordinator.tell("keeps")
        if self.is_newcomer and not self._coordinator.acknowledges:  # otherwise it has the servers' state
            self._coordinator.tell("ready", generation=self._coordinator.newest)
            self.change_over()
            self.hold()

    def allow_restart(self) -> None:
        """Report that a program keeps its state where it outlives the workers: after a loss all may begin again."""
        if self._coordinator is not None:
            self._coordinator.tell("keeps")

    def undo(self, steps: int) -> None:
        """Take note that the program has gone back by so many steps, which the next generation takes again."""
        self._num_undone += steps

    def kept(self) -> None:
        """Report one more complete memory checkpoint to this host's supervisor."""
        if self._coordinator is not None:
            self._coordinator.report_snapshot()

    def hold(self) -> None:
        """Wait, where there are too few members, until there are enough; newcomers may join meanwhile."""
        while self.holds and self._coordinator is not None:
            finish = self._coordinator.wait_for_change(self._members.generation)
            if self._lockstep.all_agree(finish is not None) and finish is not None:
                self.run(lambda: self._members.gather_objects(None))  # a save needs all members
                self._leave(finish)
            self.change_over()

    def committed(self) -> None:
        """A step is committed: report the first one of a generation to the coordinator."""
        coordinator = self._coordinator
        if coordinator is not None and (self._reports_commit or coordinator.has_acknowledged):
            self._reports_commit = coordinator.has_acknowledged = False
            coordinator.tell("committed", pid=os.getpid())

    @property
    def is_over(self) -> bool:
        """Whether the present generation is over: a member was lost."""
        return self._coordinator is not None and self._coordinator.is_over(self._members.generation)

    @property
    def planned(self) -> MembershipView | None:
        """The generation that is to replace the present one between two steps, where this worker knows of one."""
        return None if self._coordinator is None else self._coordinator.planned(self._members.generation)

    @property
    def finish(self) -> Finish | None:
        """How the run is to end; None: it goes on."""
        return None if self._coordinator is None else self._coordinator.finish

    @property
    def is_urgent(self) -> bool:
        """Whether this worker knows of a change that cannot wait for long: a lost member, or a request to leave."""
        coordinator = self._coordinator
        if self._has_notice or coordinator is None:
            return self._has_notice
        planned = coordinator.planned(self._members.generation)
        leaves = planned is not None and not set(self.ranks) <= set(planned.members)
        return leaves or self.is_over or coordinator.finish is not None

    @property
    def wants_change(self) -> bool:
        """Whether this worker knows of something to be done between two steps."""
        coordinator = self._coordinator
        if self._has_notice or self._wants_save or coordinator is None:
            return self._has_notice or self._wants_save
        return coordinator.finish is not None or coordinator.planned(self._members.generation) is not None

    def change_is_due(self) -> None:
        """Have the next `between_steps` make a change; all members call it, after the same step or pause."""
        self._is_change_due = True

    def between_steps(self) -> None:
        """Make the changes that are due; all members call it after the same step."""
        if self._is_change_due or self.holds:
            began, before_s = time.perf_counter(), self.recovery_s
            is_due, self._is_change_due = self._is_change_due, False
            if is_due:
                self._change()
            self.hold()
            self.recovery_s = before_s + time.perf_counter() - began

    @property
    def _has_notice(self) -> bool:
        return self._notice is not None and bool(self._notice.came)

    @property
    def _wants_save(self) -> bool:
        return self._holder is not None and self._holder.wants_save

    def _change(self) -> None:
        """Make a change that all members know of; one that some do not know yet comes again with the next step.

        Without a coordinator, one member that was asked to leave is enough: all leave."""
        coordinator, members = self._coordinator, self._members

        def compare() -> list[tuple[bool, int, bool]]:
            if coordinator is None:
                return members.gather_objects((self._has_notice, 0, self._wants_save))
            planned = coordinator.planned(members.generation)
            generation = planned.generation if planned is not None else 0
            known = members.gather_objects((coordinator.finish is not None, generation, self._wants_save))
            if planned is not None and {generation} == {one[1] for one in known} and self.rank not in planned.members:
                self._is_dismissed = True  # the others may be past the vote, and gone on, when this one is disrupted
            return known

        finishes, generations, saves = zip(*self.run(compare), strict=True)
        if coordinator is None and any(finishes):
            self._leave(Finish(exit_code=PREEMPTED, reason="a worker was asked to leave"))
        if coordinator is not None and coordinator.finish is not None and all(finishes):
            self._leave(coordinator.finish)
        if any(saves) and self._holder is not None:
            self._holder.save()
        if len(set(generations)) == 1 and max(generations) > members.generation:
            self.change_over()

    def _leave(self, finish: Finish) -> NoReturn:
        """Save, together with the others, and end this worker."""
        self.holds = False
        if self._holder is not None:
            self._holder.settle()
        raise CleanExit(finish.exit_code)

    def await_end(self) -> None:
        """Give the coordinator time to end this worker, which has lost contact within its replica: the coordinator
        knows which worker was lost, and kills the others of that replica. Returns where it does not."""
        if self.elastic is not None and self.elastic.workers_each > 1:
            time.sleep(END_S)  # also when the channel is closed meanwhile: the signal is on its way then

    def unserved(self, cause: str) -> None:
        """Report a lost parameter server, so that the coordinator ends all workers and starts them again. Returns
        where there is no coordinator, or it does not."""
        if self._coordinator is not None and not self._coordinator.is_orphaned:
            self._coordinator.tell("unserved", cause=cause)
            time.sleep(END_S)

    def tell_micro_batch(self, samples: int) -> None:
        """Tell the coordinator how many samples a micro-batch has: after a worker that the kernel killed for want of
        memory, it restarts all with fewer."""
        if self._coordinator is not None:
            self._coordinator.tell("micro", samples=samples)

    def short_of_memory(self, cause: str, *, micro: int) -> None:
        """Report a step for which this worker got no memory, so that the coordinator ends all workers and starts them
        again with micro-batches of so many samples. Returns as `unserved`."""
        if self._coordinator is not None and not self._coordinator.is_orphaned:
            self._coordinator.tell("short", cause=cause, micro=micro)
            time.sleep(END_S)

    @property
    def _step(self) -> int:
        return 0 if self._holder is None else self._holder.step
