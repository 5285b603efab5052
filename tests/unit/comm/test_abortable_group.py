"""Collectives on a communicator that behaves as NCCL does when a member is lost: nothing ends by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fake_nccl
from fake_nccl import FakeNccl, read_after_waits
from paceline.comm.devices import abortable_group, communicator
from paceline.comm.devices.abortable_group import AbortableGroup
from paceline.comm.devices.communicator import connect_communicator
from paceline.comm.group import Disrupted, SingleWorkerGroup
from paceline.errors import SyncError
from paceline.worker.record.error_report import is_peer_failure

LIMIT_S = 20.0


class HostOfTwo(SingleWorkerGroup):
    """What the host's group is for these tests: it counts the barriers that reach it."""

    size = 2

    def __init__(self, index: int) -> None:
        self.index, self.num_barriers = index, 0  # pyright: ignore[reportIncompatibleVariableOverride]

    def barrier(self) -> None:
        self.num_barriers += 1


class OnFake(AbortableGroup):
    """All floating-point tensors are the device's."""

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()


class Members:
    """Two members of one generation, in threads of this process; `over` says why the generation is over."""

    def __init__(self, timeout_s: float = LIMIT_S, **how: bool) -> None:
        store = dist.HashStore()
        self.over: str | None = None
        self.ends = [FakeNccl(store, index=index, size=2, **how) for index in range(2)]
        threads = [threading.Thread(target=connect_communicator, args=(end, self.check)) for end in self.ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        self.hosts = [HostOfTwo(index) for index in range(2)]
        self.groups = [
            OnFake(host, end, device=torch.device("cpu"), check=self.check, timeout_s=timeout_s)
            for host, end in zip(self.hosts, self.ends, strict=True)
        ]

    def check(self) -> None:
        if self.over is not None:
            raise Disrupted(self.over)

    def together(self, do: Callable[[AbortableGroup], Any]) -> list[Any]:
        """What each member's thread returns or raises."""
        found: list[Any] = [None, None]

        def one(index: int) -> None:
            try:
                found[index] = do(self.groups[index])
            except SyncError as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
        return found

    def lose(self, index: int) -> None:
        """A member's process ends: its connections are closed, and it aborts nothing."""
        for link in self.ends[index]._sockets.values():
            link.close()

    def close(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def summed(group: AbortableGroup, tensor: Tensor) -> None:
    group.all_reduce(tensor, what="gradients").wait()
    group.settle()


def test_collectives_of_the_device_are_those_of_all_members(members: Members) -> None:
    def do(group: AbortableGroup) -> list[list[float]]:
        own = torch.arange(4.0) + 10 * group.index
        summed, swapped = own.clone(), torch.empty(2, 2)
        group.all_reduce(summed, what="a sum").wait()
        rows = torch.empty(2, 4)
        group.begin_all_gather(own, rows, what="rows").wait()
        part = torch.empty(2)
        group.reduce_scatter(list(own.view(2, 2).unbind()), part, what="a part")
        group.begin_all_to_all(own.view(2, 2), swapped, what="parts").wait()
        group.broadcast(own, source=1)
        group.settle()
        return [one.flatten().tolist() for one in (summed, rows, part, swapped, own)]

    first, second = members.together(do)
    assert first[0] == second[0] == [10, 12, 14, 16]
    assert first[1] == second[1] == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (first[2], second[2]) == ([10, 12], [14, 16])
    assert (first[3], second[3]) == ([0, 1, 10, 11], [2, 3, 12, 13])
    assert first[4] == second[4] == [10, 11, 12, 13]


def test_a_column_of_a_matrix_is_summed_in_place(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*read_after_waits())

    def do(group: AbortableGroup) -> list[list[float]]:
        matrix = torch.ones(3, 2)
        group.all_reduce(matrix[:, 1], what="a column").wait()
        group.settle()
        return matrix.tolist()

    assert members.together(do) == [[[1, 2]] * 3] * 2


@pytest.mark.parametrize("reads", [True, False])  # whether the host reads after its wait, or looks for an error
@pytest.mark.parametrize("lost", [0, 1])
def test_a_member_that_waits_for_its_device_is_released_when_the_generation_is_over(
    lost: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads:
        monkeypatch.setattr(*read_after_waits())
    members = Members()
    members.lose(lost)
    group, numbers = members.groups[1 - lost], torch.ones(4)

    def announce() -> None:
        time.sleep(0.1)
        members.over = f"worker {lost} was killed by signal 9"

    threading.Thread(target=announce).start()
    group.all_reduce(numbers, what="gradients").wait()  # raises nothing: it has the stream wait
    assert numbers.isnan().all(), "not written yet, or by an abort: no error says so"
    for use in (group.settle, group.barrier, lambda: group.all_reduce(numbers, what="gradients")):
        with pytest.raises(Disrupted, match="killed by signal 9"):
            use()
    assert numbers.isnan().all()
    assert members.hosts[1 - lost].num_barriers == 0
    with pytest.raises(RuntimeError, match="aborted"):
        members.ends[1 - lost].all_reduce(numbers)
    members.close()


def test_a_collective_that_ends_by_an_error_has_no_result() -> None:
    members = Members(error_completes=True)
    members.lose(1)
    group, numbers = members.groups[0], torch.ones(4)
    group.all_reduce(numbers, what="gradients").wait()
    for use in (group.settle, group.barrier):
        with pytest.raises(Disrupted, match="lost contact with a peer in gradients: NCCL's watch"):
            use()
    assert numbers.isnan().all() and members.hosts[0].num_barriers == 0
    members.close()


def test_a_lack_of_memory_is_told_as_what_it_is(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(members.ends[0], "all_reduce", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        members.groups[0].all_reduce(torch.ones(4), what="gradients")
    members.groups[0].settle()


@pytest.mark.parametrize("fails", [True, False])  # the abort; else it lasts too long
def test_tensors_that_the_device_may_still_write_to_end_this_worker(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abortable_group, "ABORT_S", 0.2)
    members = Members()
    members.lose(1)
    group, numbers, released = members.groups[0], torch.ones(4), threading.Event()
    abort = members.ends[0].abort

    def refuse() -> None:
        if fails:
            raise RuntimeError("NCCL error: unhandled cuda error")
        released.wait(LIMIT_S)

    monkeypatch.setattr(members.ends[0], "abort", refuse)
    group.all_reduce(numbers, what="gradients")
    how = r"\(NCCL error: unhandled cuda error\)" if fails else "within 0.2 s"
    with pytest.raises(SyncError, match=f"did not end its collectives {how}, gradients for one.* has to end") as raised:
        group.close()
    assert is_peer_failure(raised.value), "the others go on"
    assert group._pending[0].kept[0] is numbers
    released.set()
    abort()
    members.groups[1].close()


def test_an_abort_that_fails_harms_nothing_where_all_has_ended(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.together(lambda group: group.all_reduce(torch.ones(4), what="gradients"))
    members.groups[0].settle()
    abort = members.ends[0].abort

    def refuse() -> None:
        abort()
        raise RuntimeError("NCCL error: unhandled cuda error")

    monkeypatch.setattr(members.ends[0], "abort", refuse)
    members.groups[0].close()


def test_no_vote_begins_before_the_device_has_the_sums(members: Members) -> None:
    late = threading.Event()

    def do(group: AbortableGroup) -> int:
        if group.index == 1:
            late.wait(LIMIT_S)
        group._begin(lambda: members.ends[group.index].all_reduce(torch.ones(4)), "gradients", [])
        if group.index == 0:
            threading.Timer(0.1, late.set).start()
        group.barrier()
        return members.hosts[group.index].num_barriers if late.is_set() else -1

    assert members.together(do) == [1, 1]


def test_an_error_that_the_network_notices_ends_the_generation_before_it_is_announced() -> None:
    members = Members(quiet=False)
    members.lose(1)
    members.groups[0].all_reduce(torch.ones(4), what="gradients").wait()
    with pytest.raises(Disrupted, match="lost contact with a peer: a connection was closed"):
        members.groups[0].settle()
    members.close()


def test_a_member_that_does_not_answer_is_named_by_what_is_waited_for_within_the_limit() -> None:
    members = Members(timeout_s=0.2)
    members.groups[0].all_reduce(torch.ones(4), what="gradients").wait()
    with pytest.raises(SyncError, match="waited too long for the other workers in gradients"):
        members.groups[0].settle()
    members.close()


def test_a_communicator_that_waits_for_a_lost_member_is_given_up_when_the_generation_is_over() -> None:
    alone = FakeNccl(dist.HashStore(), index=0, size=2)
    began, num_threads = time.monotonic(), threading.active_count()

    def check() -> None:
        if time.monotonic() - began > 0.1:
            raise Disrupted("worker 1 was killed by signal 9")

    with pytest.raises(Disrupted, match="worker 1"):
        connect_communicator(alone, check)
    assert time.monotonic() - began < LIMIT_S and threading.active_count() == num_threads


def test_a_communicator_that_cannot_be_aborted_while_it_is_made_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "ABANDONED_S", 0.2)
    monkeypatch.setattr(fake_nccl, "LATE_S", 3.0)
    alone = FakeNccl(dist.HashStore(), index=0, size=2, late_connect=True)
    began, before = time.monotonic(), set(threading.enumerate())

    def check() -> None:
        raise Disrupted("worker 1 was killed by signal 9")

    with pytest.raises(Disrupted, match="worker 1"):
        connect_communicator(alone, check)
    assert time.monotonic() - began < 2.5, "nobody waits for the lock"
    for left in set(threading.enumerate()) - before:
        assert left.daemon
        left.join(LIMIT_S)


def test_each_generation_has_a_communicator_of_its_own(members: Members) -> None:
    members.together(lambda group: summed(group, torch.ones(4)))
    members.over = "worker 2 has joined"
    members.close()
    again = Members()
    numbers = [torch.ones(4), torch.ones(4)]
    again.together(lambda group: summed(group, numbers[group.index]))
    assert [one.tolist() for one in numbers] == [[2.0] * 4] * 2
    again.close()
