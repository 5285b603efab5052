"""The workers of a replica leave an operation together, whichever of them has seen that it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.elastic.lockstep_group import CrossReplicaGroup, Lockstep, LockstepGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import CompletedTransfer, Disrupted, SingleWorkerGroup, Transfer

LIMIT_S = 10.0


class Inside(SingleWorkerGroup):
    """One end of a replica of two, in two threads."""

    def __init__(self, index: int, barrier: threading.Barrier, told: list[float]) -> None:
        self.index, self.size = index, 2
        self._barrier, self._told = barrier, told

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        self._told[self.index] = float(tensor)
        self._barrier.wait(LIMIT_S)
        tensor.fill_(sum(self._told))
        self._barrier.wait(LIMIT_S)
        return CompletedTransfer()


class Between(SingleWorkerGroup):
    """A group of others, whose next transfers fail in the wait, or at once."""

    size = 2

    def __init__(self) -> None:
        self.fails: str | None = None

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if self.fails == "begin":
            raise Disrupted("lost at the beginning")
        return self if self.fails == "wait" else CompletedTransfer()

    def wait(self) -> None:
        raise Disrupted("lost in the wait")

    def settle(self) -> None:
        if self.fails == "settle":
            raise Disrupted("aborted on the device")

    def gather_objects(self, value: Any) -> list[Any]:
        if self.fails is not None:
            raise Disrupted("lost in a gather")
        return [value]


class Worker:
    def __init__(self, inside: Inside) -> None:
        self.lockstep = Lockstep(inside)
        self.run, self.place = Between(), Between()
        self.whole, self.replica_group = (
            LockstepGroup(self.lockstep, recorder=FlightRecorder.unread()),
            CrossReplicaGroup(self.lockstep, recorder=FlightRecorder.unread()),
        )
        self.whole.take(self.run, 0, ranks=(0, 1))
        self.replica_group.take(self.place, 0, ranks=(0, 1))


def both(story: Callable[[Worker, int], Any]) -> list[Any]:
    """What two workers of a replica return, or the Disrupted that they raise."""
    barrier, told = threading.Barrier(2), [0.0, 0.0]
    found: list[Any] = [None, None]

    def live(index: int) -> None:
        try:
            found[index] = story(Worker(Inside(index, barrier, told)), index)
        except Disrupted as disruption:
            found[index] = str(disruption)

    threads = [threading.Thread(target=live, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def summed(group: ElasticGroup) -> None:
    group.all_reduce(torch.ones(1), what="a sum").wait()


def test_what_fails_at_one_worker_ends_the_operation_at_both() -> None:
    def story(worker: Worker, index: int) -> str:
        worker.run.fails = "wait" if index else None
        summed(worker.whole)
        return "done"

    assert both(story) == ["another worker of this replica knows that a member was lost", "lost in the wait"]


@pytest.mark.parametrize("how", ["begin", "wait"])
def test_a_sum_between_replicas_that_fails_is_kept_until_the_whole_run_does_something(how: str) -> None:
    """Meanwhile the replica goes on; workers may have different numbers of such sums."""
    reached: list[int] = []

    def story(worker: Worker, index: int) -> str:
        worker.place.fails = how if index else None
        for _ in range(1 + index):
            summed(worker.replica_group)
        reached.append(index)
        summed(worker.whole)
        return "done"

    told = both(story)
    assert sorted(reached) == [0, 1]
    assert "done" not in told


def test_anything_else_between_replicas_that_fails_is_raised_at_once_and_the_other_follows() -> None:
    def story(worker: Worker, index: int) -> str:
        worker.place.fails = "wait" if index else None
        try:
            worker.replica_group.gather_objects(1)
            summed(worker.whole)
        except Disrupted as disruption:
            worker.lockstep.abort(disruption)
            worker.place.fails = None
            summed(worker.replica_group)
            summed(worker.whole)  # and in the next generation all is well
            return "left, and went on"
        return "done"

    assert both(story) == ["left, and went on"] * 2


@pytest.mark.parametrize("where", ["run", "place"])
def test_a_sum_that_was_aborted_on_one_workers_device_is_void_at_both(where: str) -> None:
    def story(worker: Worker, index: int) -> str:
        getattr(worker, where).fails = "settle" if index else None
        summed(worker.replica_group)
        summed(worker.whole)
        worker.replica_group.settle()  # a failure between replicas is only kept
        worker.whole.settle()
        return "counts"

    assert both(story) == ["another worker of this replica knows that a member was lost", "aborted on the device"]


def test_what_goes_well_returns_and_all_have_to_say_yes() -> None:
    def story(worker: Worker, index: int) -> Any:
        summed(worker.replica_group)
        summed(worker.whole)
        worker.replica_group.settle()
        worker.whole.settle()
        return worker.whole.gather_objects(5), worker.lockstep.all_agree(True), worker.lockstep.all_agree(index == 0)

    assert both(story) == [([5], True, False)] * 2


def test_a_newcomer_asks_nobody_and_a_worker_alone_is_always_of_one_mind() -> None:
    newcomer = LockstepGroup(Lockstep(Inside(0, threading.Barrier(2), [0.0, 0.0])), recorder=FlightRecorder.unread())
    summed(newcomer)
    newcomer.settle()
    assert newcomer.gather_objects(3) == [3]
    alone = Lockstep()
    alone.settle()
    alone.note(Disrupted("a loss"))
    with pytest.raises(Disrupted, match="a loss"):
        alone.settle()
