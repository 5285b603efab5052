"""Shared memory when something is missing: members that do not come or leave, memory that is not to be had."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from memory_members import CPU, LIMIT_S, Members, Underneath
from paceline.comm.group import Disrupted, Transfer
from paceline.comm.shared_memory.arena import Arena, why_unsupported
from paceline.comm.shared_memory.setup import with_shared_memory
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.errors import SyncError

pytestmark = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(size: int, **settings: Any) -> Members:
        made.append(Members(size, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_who_does_not_come_is_named_with_the_call_and_the_time(members: Callable[..., Members]) -> None:
    group_of = members(4)

    def work(group: SharedGroup) -> None:
        group.barrier()
        if group.index in (0, 2):
            flight = group.all_reduce(torch.ones(1), what="the step metadata")
            while group.joined_counts()[2 - group.index] < 2:
                os.sched_yield()
            group._waiter._timeout_s = 0.2  # now there is nobody to wait for but the two who do not come
            flight.wait()

    began = time.monotonic()
    found = group_of.each(work)
    assert time.monotonic() - began < LIMIT_S
    for index in (0, 2):
        text = str(found[index])
        assert re.search(rf"worker {index} waited \d\.\d s in the step metadata, sum number 2", text)
        assert "worker 1 (joined 1), worker 3 (joined 1)" in text and "worker 0 (" not in text
    assert group_of.groups[0].joined_counts() == (2, 1, 2, 1)
    with pytest.raises(SyncError, match="the step metadata"):  # of no more use
        group_of.groups[0].barrier()


def test_a_peer_that_left_or_is_known_to_be_lost_ends_the_wait_at_once(members: Callable[..., Members]) -> None:
    group_of = members(3)

    def work(group: SharedGroup) -> None:
        if group.index == 1:
            group.close()
        else:
            group.all_reduce(torch.ones(1), what="the step metadata").wait()

    began = time.monotonic()
    for error in itertools.compress(group_of.each(work), (1, 0, 1)):
        assert str(error).startswith("lost contact with a peer during the step metadata: worker 1 has left")
    known = members(2, check_peers=lambda: "worker 1 was killed")
    with pytest.raises(SyncError, match="lost contact with a peer during barrier: worker 1 was killed"):
        known.groups[0].barrier()
    assert time.monotonic() - began < LIMIT_S / 2


def test_what_a_member_did_before_it_left_counts(members: Callable[..., Members]) -> None:
    group_of = members(2)
    large = [torch.ones(100_000) for _ in range(2)]

    def work(group: SharedGroup) -> float:
        transfer = group.all_reduce(large[group.index], what="a sum")
        if group.index == 1:
            transfer.wait()
            group.close()
        else:
            while not any(True for _ in group_of.arenas[0].ended_members()):
                group.progress()
            transfer.wait()
        return float(large[group.index].sum())

    assert group_of.each(work) == [200_000.0] * 2


def test_a_member_of_an_older_group_disturbs_nobody(members: Callable[..., Members]) -> None:
    old, new = members(3), members(2)
    stale = old.groups[2]
    placed = stale.allocate(1000, dtype=torch.float32, device=CPU)

    def work(group: SharedGroup) -> Tensor:
        tensor = group.allocate(1000, dtype=torch.float32, device=CPU)
        transfer = group.all_reduce(tensor.fill_(1), what="a sum")
        stale.all_reduce(placed.fill_(7), what="too late") if group.index == 0 else None
        transfer.wait()
        return tensor.clone()

    for tensor in new.each(work):
        assert tensor.tolist() == [2.0] * 1000
    assert new.groups[0].joined_counts() == (1, 1)


def test_memory_is_given_back_with_the_tensor_and_grows_in_any_order() -> None:
    arenas = [first := Arena.create(size=2), Arena.open(first.address, index=1, size=2)]
    fd = first.address[1]
    empty = os.fstat(fd).st_blocks
    ahead = [first.reserve(100_000, torch.float32) for _ in range(3)]
    behind = arenas[1].reserve(100_000, torch.float32)  # of a smaller file than it is by now
    assert first.segment(ahead[0][5:]) is not None and first.segment(torch.ones(3)) is None
    view = behind[10:20].fill_(3)
    seen = first.segment(ahead[0])
    assert seen is not None and seen.slots[1][10:20].tolist() == [3.0] * 10
    assert os.fstat(fd).st_blocks - empty >= 4 * 400_000 // 512
    del behind
    assert view.tolist() == [3.0] * 10  # a view keeps the memory
    del seen, view, ahead
    assert os.fstat(fd).st_blocks == empty
    for arena in arenas:
        arena.close()
        arena.close()
    assert not os.path.exists(f"/proc/self/fd/{fd}")


def test_an_arena_of_somebody_else_is_refused() -> None:
    arena = Arena.create(size=2)
    pid, fd, nonce = arena.address
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not this group's memory"):
        Arena.open((pid, fd, nonce + 1), index=1, size=2)
    with open(os.devnull) as other, pytest.raises(OSError, match="not this group's memory"):
        Arena.open((pid, other.fileno(), nonce), index=1, size=2)
    with pytest.raises(FileNotFoundError):
        Arena.open((pid, 9999, nonce), index=1, size=2)
    assert set(os.listdir("/proc/self/fd")) == before
    arena.close()


def test_memory_that_is_not_to_be_had_is_an_error_that_says_how_much() -> None:
    arena = Arena.create(size=2)
    with pytest.raises(
        MemoryError, match=r"[\d,]{20,} bytes of shared memory .* less memory than .* Use fewer workers"
    ):
        arena.reserve(2**58, torch.float32)  # no machine has as much: nothing is taken
    assert arena.reserve(10, torch.float32).tolist() == [0.0] * 10
    arena.close()


def test_processors_that_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "x86-64 only" in (why_unsupported() or "")


def test_a_limit_on_files_is_a_reason_not_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert "ulimit -f" in (why_unsupported() or "")


@pytest.mark.parametrize("index", [0, 1])
def test_a_member_that_is_lost_while_memory_is_shared_leaves_none_open(index: int) -> None:
    owner = Arena.create(size=2)

    class Breaking(Underneath):
        def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
            if self.index != source:
                tensor.copy_(torch.tensor(owner.address))

        def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
            raise Disrupted("worker 2 was killed by signal 9")

    before = num_arenas()
    with pytest.raises(Disrupted, match="worker 2"):
        with_shared_memory(Breaking(index, 2), timeout_s=LIMIT_S)
    assert num_arenas() == before
    owner.close()


def num_arenas() -> int:
    """How many files of shared memory this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:paceline")
    return found
