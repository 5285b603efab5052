"""A round ends at one place of the loop, after which all do the same, whichever is called when, and waits where."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor

from paceline.comm.group import CompletedTransfer, SingleWorkerGroup, Transfer, total
from paceline.errors import SyncError
from paceline.plan import Gossip, Layout, LocalSGD, Plan
from paceline.worker.loop.communication_rounds import CommunicationRounds, LoopPoint
from paceline.worker.loop.gossip_rounds import GossipRounds
from paceline.worker.step.step_scope import ReplicaVote

LIMIT_S = 20.0
STEPS = 6


class Sums:
    """Of replicas in threads, who must all be in the same one."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.whats, self.values = [""] * size, cast("list[Tensor]", [None] * size)


class Seat(SingleWorkerGroup):
    """One replica's end."""

    def __init__(self, sums: Sums, index: int) -> None:
        self.index, self.size, self._sums = index, sums.barrier.parties, sums

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        sums = self._sums
        sums.whats[self.index], sums.values[self.index] = what, tensor.clone()
        sums.barrier.wait(LIMIT_S)
        assert len(set(sums.whats)) == 1, f"replicas do different things: {sums.whats}"
        tensor.copy_(cast("Tensor", sum(sums.values)))
        sums.barrier.wait(LIMIT_S)
        return CompletedTransfer()


class Replica:
    """Goes through the loop as `Loop` does, and notes what it does with the others. `called_at`: the step in whose
    pass it hears that something cannot wait."""

    def __init__(self, seat: Seat, sync: Any, called_at: int | None) -> None:
        self.did: list[tuple[str, int, str]] = []
        self._seat, self._called_at, self._is_change_due = seat, called_at, False
        self.step, self.wants_change, self.is_urgent, self.holds = 0, False, False, False
        self.rank, self.ranks = seat.index, tuple(range(seat.size))
        self.generation, self.is_behind = 0, False
        made = GossipRounds if isinstance(sync, Gossip) else CommunicationRounds
        self.rounds = made(
            Plan(layout=Layout(replicas=(1, 4)), sync=sync),
            group=cast("Any", seat),
            axes=cast("Any", SimpleNamespace(is_split=False, expert_replica_group=seat)),
            consensus=cast("Any", self),
            replica_vote=ReplicaVote(cast("Any", self)),
            models=cast("Any", SimpleNamespace(reducers=SimpleNamespace(stepped=lambda: None))),
            weights_changed=lambda: None,
        )
        self.rounds._agreeing = cast("Any", [self])
        if isinstance(self.rounds, GossipRounds):
            self.rounds._gossiping = cast("Any", [self])
        self.sums = SimpleNamespace(is_finite=lambda: True)

    # What rounds ask of an agreement, and of those who agree.

    def do(self, operation: Callable[[], Any]) -> Any:
        return operation()

    def change_is_due(self) -> None:
        self._is_change_due = True

    def exchange(self, share: float, numbers: Sequence[float], *, step: int) -> list[float]:
        total(self._seat, [1.0], what="the agreement")
        return list(numbers)

    def mix(self, step: int) -> None:
        total(self._seat, [1.0], what="the mixing")

    def take(self) -> None: ...

    def take_mixed(self) -> None:
        self._note("mixed")

    # The loop.

    def run_pass(self, operations: Callable[[int, LoopPoint], bool]) -> None:
        rounds = self.rounds
        for number in range(1, STEPS + 1):
            rounds.loop_point = LoopPoint.WAITING
            if not rounds.is_open and self._is_change_due:
                total(self._seat, [1.0], what="a change of the members")
                self._note("left")
                return
            rounds.loop_point = LoopPoint.IN_HAND
            if operations(number, LoopPoint.IN_HAND):
                self.operate()
            self.is_urgent = self.wants_change = self._called_at is not None and number >= self._called_at
            if self.is_urgent:  # the pass's step metadata has said so
                rounds._replica_vote.is_called = True
            self.step = number
            rounds.stepped(cast("Any", SimpleNamespace(step=number, shares={})))
            if operations(number, LoopPoint.STEPPED):
                self.operate()
            rounds.loop_point = LoopPoint.FOLLOWING
            if rounds.is_over(lambda _: False):
                self.end_round(is_wanted=True)
            elif rounds.is_mixing_due(self.step):
                self.end_round(is_wanted=False)
            rounds.followed()
        rounds.loop_point = LoopPoint.WAITING
        self.end_round(is_wanted=True)

    def operate(self) -> None:
        self.end_round(is_wanted=self.rounds.is_over(lambda _: False))
        self.rounds.require_nobody_ahead(self.step)
        total(self._seat, [1.0], what="an operation")
        self._note("operation")

    def end_round(self, *, is_wanted: bool) -> None:
        if self.rounds.is_open and self.rounds.end(self.step, run_more=lambda _: None, is_wanted=is_wanted):
            self._note("ended")

    def _note(self, what: str) -> None:
        self.did.append((what, self.step, self.rounds.loop_point.name))


def together(
    sync: Any, called_at: Sequence[int | None], *operations: Callable[[int, LoopPoint], bool]
) -> list[list[tuple[str, int, str]]]:
    """What each of some replicas, in threads, has done with the others."""
    sums = Sums(len(called_at))
    replicas = [Replica(Seat(sums, index), sync, called) for index, called in enumerate(called_at)]
    errors: list[BaseException] = []

    def live(replica: Replica, operations: Callable[[int, LoopPoint], bool]) -> None:
        try:
            replica.run_pass(operations)
        except BaseException as error:  # of whatever kind: it is raised in the test
            errors.append(error)
            sums.barrier.abort()

    pairs = zip(replicas, itertools.cycle(operations), strict=False)
    threads = [threading.Thread(target=live, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in (*causes, *errors):
        raise error
    return [replica.did for replica in replicas]


def each(every: int, stand: LoopPoint, number: int, at: LoopPoint) -> bool:
    """Whether there is an operation: at this place of every so many steps."""
    return at == stand and number % every == 0


@pytest.mark.parametrize("stand", [LoopPoint.STEPPED, LoopPoint.IN_HAND], ids=["after the step", "before it"])
@pytest.mark.parametrize(
    "sync",
    [
        LocalSGD(every=1),
        LocalSGD(every=4),
        LocalSGD(every=100),
        Gossip(every=1, average_every=4),
        Gossip(every=2, average_every=100),
    ],
    ids=str,
)
def test_all_do_the_same_at_the_same_places_whichever_is_called_when(sync: Any, stand: LoopPoint) -> None:
    steps = range(1, STEPS + 1)
    for called, operates in itertools.product(steps, steps):
        for others in ((None,), (None, min(called + 2, STEPS))):
            did = together(sync, (called, *others), functools.partial(each, operates, stand))
            assert all(one == did[0] for one in did), (called, operates, did)


def test_a_round_does_not_end_where_the_others_wait_with_the_next_batch_in_hand() -> None:
    did = together(LocalSGD(every=4), (2, None), lambda number, at: number == 3 and at == LoopPoint.IN_HAND)
    assert did[0] == [("operation", 2, "IN_HAND"), ("ended", 3, "FOLLOWING"), ("left", 3, "WAITING")]


def test_who_comes_to_an_operation_that_another_has_gone_past_is_told_so() -> None:
    with pytest.raises(SyncError, match="after step 2, and another one has gone past that place, to step 4"):
        together(
            LocalSGD(every=4),
            (None, None),
            lambda number, at: number == 2 and at == LoopPoint.STEPPED,
            lambda number, at: False,
        )


@pytest.mark.parametrize("lost_in", ["look", "agree"])
def test_who_is_disrupted_in_an_agreement_that_others_are_past_is_left_behind(lost_in: str) -> None:
    """In the middle of a round others may well be further, and all end it together."""
    replica = Replica(Seat(Sums(1), 0), LocalSGD(every=1), None)

    def do(operation: Callable[[], Any]) -> Any:
        if operation.__name__ == lost_in:
            replica.generation, replica.is_behind = 1, True
        return operation()

    replica.do = do
    replica.step = 1
    replica.rounds.stepped(cast("Any", SimpleNamespace(step=1, shares={})))
    replica.end_round(is_wanted=True)
    assert replica.did == [("ended", 1, "STEPPED")]
    assert replica.rounds.is_left_behind is (lost_in == "agree")
