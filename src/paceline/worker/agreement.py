"""How the members of a run do things together: all of them, or none.

Everything that all workers take part in (a walk over a batch, an evaluation, a gather) is an *operation*. In an elastic
run each ends with a vote: who has its result says so, and waits until all have. When a member is lost before that, the
others *regroup*: they form the next generation, and compare where they stand. If anybody has got past the vote, or all
of them hold the result, everybody takes it; otherwise nobody does, and the operation is done again. So two members are
never more than one operation apart, and never disagree about whether a step was committed.

Who joins gets its state from a member, between two steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from paceline.comm.generation import Members
from paceline.comm.group import Disrupted, WorkerGroup
from paceline.elastic.notices import Finish, Form
from paceline.errors import SyncError
from paceline.worker.orders import Orders

__all__ = ["Agreement", "Elastic", "Holder", "Leaving", "Together"]

T = TypeVar("T")


class Leaving(SystemExit):
    """This worker has nothing more to do here, in good order: its exit code says why."""


class Together(Protocol):
    """How an operation is done: `Agreement.run`."""

    def __call__(self, operation: Callable[[], T]) -> T: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where a member stands when it regroups."""

    position: int | None  # operations that it has completed; None: a newcomer
    holds_result: bool  # of the next one
    step: int


class Holder(Protocol):
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
class Elastic:
    """What a run needs whose members change."""

    build: Callable[[Form], WorkerGroup]  # the group of a generation; raises Disrupted where that is over already


class Agreement:
    """Does operations for one worker; without `elastic` they are simply done, and a lost member is an error."""

    def __init__(
        self,
        members: Members,
        *,
        rank: int,
        orders: Orders | None,
        timeout_s: float,
        elastic: Elastic | None = None,
    ) -> None:
        self.elastic = elastic
        self.holds = False  # too few members to take steps
        self._holder: Holder | None = None
        self._members, self._rank, self._orders, self._timeout_s = members, rank, orders, timeout_s
        self._position: int | None = None  # operations that were completed; None: a newcomer
        self._is_change_due = False
        self._tells_commit = False

    def attach(self, holder: Holder) -> None:
        """Say whose state it is."""
        self._holder = holder
        if self._orders is not None:
            self._orders.step = lambda: holder.step

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker came later, and has not been taken in."""
        return self._members.is_newcomer

    def begin(self, members: tuple[int, ...]) -> None:
        """Join the run's first generation, or the one that has replaced it meanwhile."""
        self._position = 0
        form = Form(generation=0, members=members, planned=False, holds=False, reason="the run begins")
        elastic, orders = self.elastic, self._orders
        if elastic is None or orders is None:
            return
        try:
            self._members.take(elastic.build(form), 0)
            orders.tell("formed", generation=0, noticed=time.time())
        except Disrupted:
            self._members.generation = 0
            self.regroup(holds_result=False)

    def run(self, operation: Callable[[], T]) -> T:
        """Do an operation to its end, through as many generations as it takes; newcomers leave it out."""
        while True:
            try:
                value = operation()
            except Disrupted:
                if self.elastic is None:
                    raise
                self.regroup(holds_result=False)
                continue
            if self.vote():
                return value

    def vote(self) -> bool:
        """Wait until all members have the operation's result; False: it is void, and has to be done again."""
        if self.elastic is not None and not self.is_newcomer:
            try:
                self._members.all_reduce(torch.zeros(1), what="the vote").wait()
            except Disrupted:
                if not self.regroup(holds_result=True):
                    return False
        self._position = None if self._position is None else self._position + 1
        return True

    def regroup(self, *, holds_result: bool) -> bool:
        """Form the next generation; returns whether the operation under way counts as done.

        Raises Leaving where this worker is not in it.
        """
        orders, elastic = self._orders, self.elastic
        if orders is None or elastic is None:
            raise SyncError("a member was lost, and this run has a fixed number of replicas")
        noticed = time.time()
        while True:
            form = orders.wait_for(self._members.generation, timeout_s=self._timeout_s)
            if self._rank not in form.members:
                if self._position is None:  # not taken in yet; its time will come
                    self._members.generation = form.generation
                    continue
                raise Leaving(0)
            try:
                self._members.take(elastic.build(form), form.generation)
                stands: list[Standing] = self._members.gather_objects(
                    Standing(self._position, holds_result, self._step)
                )
                is_done = _is_done(stands, self._position, holds_result)
                self._hand_over(stands)
            except Disrupted:
                self._members.generation = max(self._members.generation, form.generation)
                continue
            break
        self.holds = form.holds
        self._tells_commit = True
        orders.tell("formed", generation=form.generation, noticed=noticed)
        if self._holder is not None:
            self._holder.regrouped()
        return is_done

    def begin_steps(self) -> None:
        """The first loop over batches begins: a newcomer waits until it is taken in, and has a member's state then."""
        if self._orders is None:
            return
        self._orders.tell("begun")
        if self.is_newcomer:
            self._orders.tell("ready")
            self.regroup(holds_result=False)
            self.hold()

    def hold(self) -> None:
        """Wait, where there are too few members, until there are enough; a newcomer may be taken in meanwhile."""
        while self.holds and self._orders is not None:
            finish = self._orders.wait_for_change(self._members.generation)
            if finish is not None:
                self._leave(finish)
            self.regroup(holds_result=False)

    def committed(self) -> None:
        """A step is committed: the first one of a generation is told."""
        if self._tells_commit and self._orders is not None:
            self._tells_commit = False
            self._orders.tell("committed")

    @property
    def wants_change(self) -> bool:
        """Whether this worker knows of something to be done between two steps."""
        orders = self._orders
        if orders is None:
            return False
        return orders.finish is not None or orders.planned(self._members.generation) is not None

    def change_is_due(self) -> None:
        """The members have told each other, in a step's tally, that one of them wants a change."""
        self._is_change_due = True

    def between_steps(self) -> None:
        """Make the changes that are due, at a place that is the same on all members."""
        self.hold()
        if not self._is_change_due or self._orders is None:
            return
        self._is_change_due = False
        orders = self._orders
        planned = orders.planned(self._members.generation)
        own = (orders.finish is not None, planned.generation if planned is not None else 0)
        known = self.run(lambda: self._members.gather_objects(own))
        if all(finishes for finishes, _ in known) and orders.finish is not None:
            self._leave(orders.finish)
        generations = {generation for _, generation in known}
        is_known = planned is not None and generations == {planned.generation}
        if is_known and orders.planned(self._members.generation) is not None:
            self.regroup(holds_result=False)
            self.hold()
        # Otherwise somebody has not heard yet what the others have: the next step's tally says so again.

    def _leave(self, finish: Finish) -> NoReturn:
        """Save, together with the others, and end this worker."""
        self.holds = False
        if self._holder is not None:
            self._holder.settle()
        raise Leaving(finish.exit_code)

    @property
    def _step(self) -> int:
        return 0 if self._holder is None else self._holder.step

    def _hand_over(self, stands: list[Standing]) -> None:
        """The first of those who have the state sends it to newcomers, one after the other."""
        newcomers = [index for index, one in enumerate(stands) if one.position is None]
        if not newcomers or self._holder is None:
            return
        source = next(index for index, one in enumerate(stands) if one.position is not None)
        if self._members.index == source:
            state = (self._position, self._holder.snapshot())
            for index in newcomers:
                self._members.send_object(state, to=index)
        elif self._position is None:
            position, state = self._members.receive_object(source=source)
            self._holder.fill(state)
            self._position = position


def _is_done(stands: list[Standing], position: int | None, holds_result: bool) -> bool:
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
