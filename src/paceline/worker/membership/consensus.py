"""How the members of a run do things together: all of them, or none.

Everything that all workers take part in (a walk over a batch, an evaluation, a gather) is an *operation*. In an elastic
run each ends with a vote: who has its result says so, and waits until all have. When a member is lost before that, the
others *regroup*: they form the next generation, and compare where they stand. If anybody has got past the vote, or all
of them hold the result, everybody takes it; otherwise nobody does, and the operation is done again. So two members are
never more than one operation apart, and never disagree about whether a step was committed.

With replicas of several workers those of one replica act as one: in an operation they compare what has failed
(`paceline.comm.elastic.lockstep_group`), so they drop it together, and they have formed a generation when each of them
has.

Who joins gets its state from a member, between two steps.

Where replicas take batches by themselves, dealt by servers, they are *apart* inside the loop: whoever is lost or joins
then, nobody waits, and nothing is done again. Members come together, in the newest generation, at its end, and where
all are to save and leave. Who came later has worked with the others by then, without a state from any of them.

All may also leave between two steps: because the head has said so to everybody, because one of them was asked to where
there is no head (`PreemptionNotice`), or because the supervisor has gone. In the last case nobody writes before all
members of the present generation have said that they leave after this same step: a part of a run never saves for the
whole.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.elastic.lockstep_group import Lockstep
from paceline.comm.group import Disrupted, WorkerGroup
from paceline.elastic.membership_messages import PREEMPTED, Finish, MembershipView
from paceline.errors import SyncError
from paceline.worker.membership.coordinator_client import CoordinatorClient
from paceline.worker.membership.preemption import PreemptionNotice

__all__ = ["CleanExit", "Consensus", "ElasticMembership", "RunTogether", "StateHolder"]

T = TypeVar("T")

END_S = 3.0  # within which the head has heard of a death, and acted on it


class CleanExit(SystemExit):
    """This worker has nothing more to do here, in good order: its exit code says why."""


class RunTogether(Protocol):
    """How an operation is done: `Consensus.run`."""

    def __call__(self, operation: Callable[[], T]) -> T: ...


@dataclasses.dataclass(frozen=True, slots=True)
class MemberProgress:
    """Where a member stands when it regroups."""

    position: int | None  # operations that it has completed; None: a newcomer
    holds_result: bool  # of the next one
    step: int


class StateHolder(Protocol):
    """Who has the state that members hold in common: the worker."""

    @property
    def step(self) -> int: ...

    def snapshot(self) -> Any:
        """The whole state, to be sent to a newcomer."""

    def fill(self, state: Any) -> None:
        """Take over what `snapshot` gave elsewhere."""

    def regrouped(self) -> None:
        """The members are others."""

    def settle(self) -> None:
        """Save, and wait until the checkpoint is complete; on all members."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ElasticMembership:
    """What a run needs whose members change."""

    build: Callable[[MembershipView, bool], WorkerGroup]
    """The group of a generation, and whether the others are awaited in a hurry; Disrupted where it is over already."""

    has_formed: Callable[[int, bool], bool]
    """Whether all workers of this replica have formed a generation; all whom its members have met say what they know of
    themselves. Who says no does not wait for the others."""

    lockstep: Lockstep  # of the workers of this replica
    workers_each: int  # of a replica


class Consensus:
    """Does operations for one worker; without `elastic` they are simply done, and a lost member is an error.

    `orders` are those of a head; where there is none, `notice` hears what this worker alone is asked.
    """

    def __init__(
        self,
        members: ElasticGroup,
        *,
        rank: int,
        orders: CoordinatorClient | None,
        notice: PreemptionNotice | None = None,
        timeout_s: float,
        elastic: ElasticMembership | None = None,
    ) -> None:
        self.elastic = elastic
        self._lockstep = Lockstep() if elastic is None else elastic.lockstep
        self.holds = False  # too few members to take steps
        self.is_behind = False  # when this generation formed, others had taken a step that this worker had not
        self.recovery_s = 0.0  # that changes of the members have cost this worker: dropped work, regrouping
        self._holder: StateHolder | None = None
        self._members, self._rank, self._orders, self._timeout_s = members, rank, orders, timeout_s
        self._notice = notice
        self._position: int | None = None  # operations that were completed; None: a newcomer
        self._is_change_due = False
        self._tells_commit = False
        self._is_dismissed = False  # all have agreed to go on without this one
        self._come: Callable[[], None] = lambda: None
        self._is_apart = False
        self._has_come = False  # this worker came later, and is one of them

    def attach(self, holder: StateHolder) -> None:
        """Say whose state it is."""
        self._holder = holder
        if self._orders is not None:
            self._orders.step = lambda: holder.step

    @property
    def generation(self) -> int:
        """The number of the present generation; a fixed number of replicas has only one."""
        return self._members.generation

    def check(self) -> None:
        """Raise Disrupted where the present generation is over, though no transfer has failed."""
        if self.elastic is not None and self._orders is not None:
            self._orders.check(self._members.generation)

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker came later, and has not been taken in."""
        return self._members.is_newcomer

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the present members, by their index in the group."""
        return self._members.ranks

    def begin(self, members: tuple[int, ...]) -> None:
        """Join the run's first generation, or the one that has replaced it meanwhile."""
        self._position = 0
        form = MembershipView(generation=0, members=members, planned=False, holds=False, reason="the run begins")
        elastic, orders = self.elastic, self._orders
        if elastic is None or orders is None:
            return
        try:
            self._members.take(elastic.build(form, False), 0, ranks=members)
            has_formed = True
        except Disrupted:
            self._members.generation, has_formed = 0, False
        if elastic.has_formed(0, has_formed):
            orders.tell("formed", generation=0, noticed=time.time())
        else:
            self._regroup(orders, elastic, holds_result=False)

    def come_by(self, come: Callable[[], None]) -> None:
        """Have `come()` called before each operation: where replicas take steps by themselves, they come together."""
        self._come = come

    def run(self, operation: Callable[[], T]) -> T:
        """Do an operation to its end, through as many generations as it takes; newcomers leave it out."""
        self._come()
        self.rejoin_group()
        return self.do(operation)

    def do(self, operation: Callable[[], T]) -> T:
        """The same, of replicas that have come together."""
        while True:
            began = time.perf_counter()
            try:
                value = operation()
            except Disrupted as disruption:
                if self.elastic is None:
                    raise
                self.drop(disruption)
            else:
                if self.vote():
                    return value
            self.recovery_s += time.perf_counter() - began

    def part(self) -> None:
        """From now on this worker does without the others: nobody is awaited in a collective."""
        self._members.part(self._rank)
        if self.elastic is not None and self._orders is not None:
            self._is_apart = True
            self._orders.part()

    def come(self) -> None:
        """This worker, which came later, needs nothing of the others: return when it is one of them. Raises Leaving."""
        orders = self._needed()[0]
        finish = orders.come()
        if finish is not None:
            raise CleanExit(finish.exit_code)
        self._has_come = True

    def await_run_end(self) -> NoReturn:
        """This worker came too late to do anything: the head ends it with the run. Raises Leaving."""
        orders = self._needed()[0]
        while (finish := orders.wait_for_change(orders.newest)) is None:
            pass
        raise CleanExit(finish.exit_code)

    def rejoin_group(self) -> None:
        """From now on this worker does things together with the others again, where it was apart."""
        self._members.join()
        if self._is_apart and self._orders is not None:
            self._is_apart = False
            self._orders.join()
            if self.is_newcomer:
                if not self._has_come:  # all loops that it has seen were over, and the others are somewhere behind them
                    self.await_run_end()
                self._change_over()

    def await_enough(self) -> None:
        """Where this worker is apart: return when there are enough members, or it has something else to do."""
        if self._is_apart and self._orders is not None:
            self._orders.await_enough()

    @property
    def is_dismissed(self) -> bool:
        """Whether the others, who are apart, go on without this worker."""
        return self._is_apart and self._orders is not None and self._orders.is_dismissed

    @property
    def present(self) -> tuple[int, ...]:
        """Where this worker is apart: the ranks of all members, as far as it has heard of others than at first."""
        return self._orders.members if self._is_apart and self._orders is not None else ()

    @property
    def has_changed(self) -> bool:
        """Whether the members are, or may be, others than those who began the run."""
        return self.is_newcomer or (self._orders is not None and self._orders.newest > 0)

    def depart(self) -> NoReturn:
        """Leave the run to the others. Raises Leaving."""
        self._depart(self._needed()[0])

    def vote(self) -> bool:
        """Wait until all members have the operation's result; False: it is void, and has to be done again."""
        if self.elastic is not None and not self.is_newcomer:
            try:
                self._lockstep.settle()
            except Disrupted as disruption:  # sums between replicas have failed: there is no result
                self.drop(disruption)
                return False
            try:
                self._members.all_reduce(torch.zeros(1), what="the vote").wait()
            except Disrupted as disruption:
                # Where others of the replica have got past it, all members hold the result, and find that out.
                if not self.drop(disruption, holds_result=True):
                    return False
            if self._orders is not None:
                self._orders.end_if_overdue()  # this process may have stood still, and others have begun again
        self._position = None if self._position is None else self._position + 1
        return True

    def drop(self, disruption: Disrupted, *, holds_result: bool = False) -> bool:
        """Leave the operation under way, with all workers of this replica, and form the next generation; returns
        whether the operation counts as done. Raises Leaving where this worker is not in that generation."""
        orders, elastic = self._needed()
        self._lockstep.part(disruption)
        return self._regroup(orders, elastic, holds_result=holds_result)

    def _change_over(self) -> None:
        """Form the next generation between two steps, as all who stand in this one do. Raises Leaving as `drop`."""
        self._regroup(*self._needed(), holds_result=False, is_between_steps=True)

    def _needed(self) -> tuple[CoordinatorClient, ElasticMembership]:
        if self._orders is None or self.elastic is None:
            raise SyncError("a member was lost, and this run has a fixed number of replicas")
        return self._orders, self.elastic

    def _regroup(
        self,
        orders: CoordinatorClient,
        elastic: ElasticMembership,
        *,
        holds_result: bool,
        is_between_steps: bool = False,
    ) -> bool:
        members, noticed = self._members, time.time()
        if not is_between_steps:
            self._tell_stuck(orders)
        while True:
            if self._is_dismissed:
                self._depart(orders)
            form = orders.wait_for(members.generation, is_between_steps=is_between_steps, timeout_s=self._timeout_s)
            is_newcomer = self._position is None and not orders.acknowledges
            if is_newcomer and (self._rank not in form.members or not form.planned):
                members.generation = form.generation  # that one is for those who have the state
                orders.tell("ready", generation=form.generation)
                continue
            if self._rank not in form.members:
                self._depart(orders)
            try:
                is_hurry = not is_newcomer and not orders.acknowledges  # others may still have a batch in hand
                members.take(elastic.build(form, is_hurry), form.generation, ranks=form.members)
                stands: list[MemberProgress] = members.meet(MemberProgress(self._position, holds_result, self._step))
                is_done = _is_done(stands, self._position, holds_result)
                received = self._hand_over(stands, elastic.workers_each)
            except Disrupted:
                members.generation = max(members.generation, form.generation)
                elastic.has_formed(form.generation, False)
                if not is_newcomer:
                    self._tell_stuck(orders)
            else:
                if elastic.has_formed(form.generation, True):
                    break
            if is_newcomer:
                orders.tell("ready", generation=form.generation)
        if received is not None and self._holder is not None:
            self._position, state = received
            self._holder.fill(state)
        elif self._position is None:
            self._position = 0  # all have come later, and have what the servers have
        self.holds = form.holds
        self.is_behind = any(one.step > self._step for one in stands)
        self._tells_commit = True
        orders.tell("formed", generation=form.generation, noticed=noticed)
        if self._holder is not None:
            self._holder.regrouped()
        return is_done

    @staticmethod
    def _depart(orders: CoordinatorClient) -> NoReturn:
        """The others go on without this worker."""
        orders.tell("left")
        raise CleanExit(0)

    def _tell_stuck(self, orders: CoordinatorClient) -> None:
        """Where a transfer has failed, and nobody is known to be lost, the head should know of it."""
        if orders.newest <= self._members.generation:
            orders.tell("stuck", generation=self._members.generation)

    def begin_steps(self, *, keeps: bool = False) -> None:
        """The first loop over batches begins: a newcomer waits until it is taken in, and has a member's state then.

        `keeps`: what this worker does is kept in memory that outlives it.
        """
        if self._notice is not None:
            self._notice.begin_steps()
        if self._orders is None:
            return
        self._orders.tell("begun")
        if keeps:
            self._orders.tell("keeps")
        if self.is_newcomer and not self._orders.acknowledges:  # otherwise it has the servers' state
            self._orders.tell("ready", generation=self._orders.newest)
            self._change_over()
            self.hold()

    def kept(self) -> None:
        """One more snapshot counts, in memory that outlives this worker."""
        if self._orders is not None:
            self._orders.report_snapshot()

    def hold(self) -> None:
        """Wait, where there are too few members, until there are enough; a newcomer may be taken in meanwhile."""
        while self.holds and self._orders is not None:
            finish = self._orders.wait_for_change(self._members.generation)
            if self._lockstep.all_say(finish is not None) and finish is not None:
                self.run(lambda: self._members.gather_objects(None))  # all are there, or nobody saves
                self._leave(finish)
            self._change_over()

    def committed(self) -> None:
        """A step is committed: the first one of a generation is told."""
        orders = self._orders
        if orders is not None and (self._tells_commit or orders.has_acknowledged):
            self._tells_commit = orders.has_acknowledged = False
            orders.tell("committed", pid=os.getpid())

    @property
    def rank(self) -> int:
        """This worker's, of the whole run."""
        return self._rank

    @property
    def is_over(self) -> bool:
        """Whether the present generation is: a member was lost."""
        return self._orders is not None and self._orders.is_over(self._members.generation)

    @property
    def is_urgent(self) -> bool:
        """Whether this worker knows of something that cannot wait for long: a lost member, or who is asked to leave."""
        if self._notice is not None and self._notice.came:
            return True
        orders = self._orders
        if orders is None:
            return False
        planned = orders.planned(self._members.generation)
        leaves = planned is not None and not set(self.ranks) <= set(planned.members)
        return leaves or self.is_over or orders.finish is not None

    @property
    def wants_change(self) -> bool:
        """Whether this worker knows of something to be done between two steps."""
        if self._notice is not None and self._notice.came:
            return True
        orders = self._orders
        if orders is None:
            return False
        return orders.finish is not None or orders.planned(self._members.generation) is not None

    def change_is_due(self) -> None:
        """All members know, by a step's metadata or a pause that all make, that one of them wants a change."""
        self._is_change_due = True

    def between_steps(self) -> None:
        """Make the changes that are due, at a place that is the same on all members."""
        if self._is_change_due or self.holds:
            began, before_s = time.perf_counter(), self.recovery_s
            self._make_changes()
            self.recovery_s = before_s + time.perf_counter() - began

    def _make_changes(self) -> None:
        if self._is_change_due:
            self._is_change_due = False
            if self._orders is not None:
                self._change(self._orders)
            else:  # the metadata, the same on all, or a pause of all says that somebody was asked: that is enough
                self._leave(Finish(exit_code=PREEMPTED, reason="a worker was asked to leave"))
        self.hold()

    def _change(self, orders: CoordinatorClient) -> None:
        """Compare what all know of, and do it where all know the same; else the next step's metadata says it again."""

        def compare() -> list[tuple[bool, int]]:
            planned = orders.planned(self._members.generation)
            own = (orders.finish is not None, planned.generation if planned is not None else 0)
            known = self._members.gather_objects(own)
            if planned is not None and {own[1]} == {one for _, one in known} and self._rank not in planned.members:
                self._is_dismissed = True  # the others may be past the vote, and gone on, when this one is disrupted
            return known

        known = self.run(compare)
        if all(finishes for finishes, _ in known) and orders.finish is not None:
            self._leave(orders.finish)
        generations = {generation for _, generation in known}
        if len(generations) == 1 and max(generations) > self._members.generation:
            self._change_over()

    def _leave(self, finish: Finish) -> NoReturn:
        """Save, together with the others, and end this worker."""
        self.holds = False
        if self._holder is not None:
            self._holder.settle()
        raise CleanExit(finish.exit_code)

    def await_end(self) -> None:
        """Where this worker has lost contact within its replica, leave it to the head to say why: it knows who died,
        and kills the others of that replica. Returns where it does not."""
        if self.elastic is not None and self.elastic.workers_each > 1:
            time.sleep(END_S)  # also when the channel is closed meanwhile: the signal is on its way then

    def unserved(self, cause: str) -> None:
        """A parameter server was lost: leave it to the head to end all workers, and to have them begin again. Returns
        where there is no head, or it does not."""
        if self._orders is not None and not self._orders.is_orphaned:
            self._orders.tell("unserved", cause=cause)
            time.sleep(END_S)

    @property
    def _step(self) -> int:
        return 0 if self._holder is None else self._holder.step

    def _hand_over(self, stands: list[MemberProgress], workers_each: int) -> tuple[int, Any] | None:
        """Of the workers at each place of a replica, the first who has the state sends it to newcomers, one after the
        other. Returns what came for this worker."""
        newcomers = [index for index, one in enumerate(stands) if one.position is None]
        if not newcomers or self._holder is None:
            return None
        positions = [one.position for one in stands if one.position is not None]
        if not positions and self._orders is not None and self._orders.acknowledges:
            return None
        if not positions:
            raise Disrupted("none of those who met has the run's state")
        ranks, place, newest = self._members.ranks, self._rank % workers_each, max(positions)
        alike = [index for index in range(len(stands)) if ranks[index] % workers_each == place]
        source = next(index for index in alike if stands[index].position == newest)
        if self._members.index == source:
            at = stands[source]
            state = (newest + _is_done(stands, at.position, at.holds_result), self._holder.snapshot())
            for index in alike:
                if index in newcomers:
                    self._members.send_object(state, to=index)
        elif self._position is None:
            return self._members.receive_object(source=source)
        return None


def _is_done(stands: list[MemberProgress], position: int | None, holds_result: bool) -> bool:
    """Whether the operation that was under way counts: somebody is past it, or all who were in it have its result."""
    if position is None:
        return False
    others = [one for one in stands if one.position is not None]
    if any(one.position is not None and one.position > position for one in others):
        if not holds_result:
            raise SyncError("a member has completed an operation whose result another one does not have")
        return True
    here = [one for one in others if one.position == position]
    return all(one.holds_result for one in here)
