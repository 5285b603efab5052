"""A group whose sums walk a schedule: a ring, two trees, by halves, or inside each host first; the rest is another's.

The way of a sum may be on trial: then all begin together, it is waited for where it was begun, and whoever chose it is
told what it took.

Inside a host the workers of a CPU meet in memory, if they can (`comm/shared_memory/shared_group.py`): then the
hierarchical algorithm sums there, walks the schedule of the hosts with a slice of the tensor for each of the first
workers of a host, and tells the others in memory again. Where they cannot, all of it is sent.

What is smaller than a cache line or two (a step's vote, a barrier) goes the back end's way: it is nothing but latency,
and nobody may wait for a thread to have its turn.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.allreduce.async_collectives import AsyncCollective, CollectiveThreads
from paceline.comm.allreduce.schedule_executor import ReceiveBuffers, ScheduleExecution
from paceline.comm.group import CompletedTransfer, Group, Transfer, WorkerGroup, copy_into
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.errors import SyncError
from paceline.schedule.allreduce.build import between_hosts, build, num_chunks_of
from paceline.schedule.allreduce.hierarchical import hosts_of, slices_of
from paceline.schedule.allreduce.worker_program import Program, program_of

__all__ = ["BACKEND", "MIN_NUMEL", "ScheduledGroup", "SelectedAlgorithm", "backend_group_of"]

BACKEND = "backend"  # in place of an algorithm: the back end's own all-reduce
MIN_NUMEL = 64  # that are worth a schedule
NUM_THREADS = 2
FIRST_TAG, NUM_TAGS = 1 << 16, 1 << 20  # beside those of anybody else's messages


@dataclasses.dataclass(frozen=True, slots=True)
class SelectedAlgorithm:
    """How a tensor is summed. `tell`, of a way that is on trial, wants to know how many seconds it took."""

    name: str  # an algorithm's, or BACKEND
    tell: Callable[[float], None] | None = None


class ScheduledGroup:
    """Two or more workers; `choose(bytes)` says how a tensor is summed, the same on all of them.

    `base` does all else; `hosts[k]` is the host of member k; `near` are those of this worker's host, where they meet in
    memory on every host that has several; nobody else uses it.
    """

    def __init__(
        self,
        base: WorkerGroup,
        *,
        choose: Callable[[int], SelectedAlgorithm],
        hosts: Sequence[int],
        ranks: Sequence[int],
        timeout_s: float,
        check: Callable[[], None],
        lost: type[SyncError] = SyncError,
        near: WorkerGroup | None = None,
    ) -> None:
        self.index, self.size = base.index, base.size
        self.base, self.hosts, self.near = base, tuple(hosts), near
        self.choose = choose
        self._over, self._ranks = backend_group_of(base), tuple(ranks)
        # Memory of a host is for one thread at a time.
        num_threads = NUM_THREADS if near is None else 1
        self._errands = CollectiveThreads(num_threads=num_threads, timeout_s=timeout_s, check=check, lost=lost)
        self._programs: dict[tuple[str, int], Program] = {}
        self._teams = hosts_of(self.hosts)
        self._num_walks = 0
        self._under_way: list[AsyncCollective] = []
        self._stream: Any = None

    @property
    def shares_memory(self) -> bool:
        return self.base.shares_memory

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.base.allocate(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        if tensor.numel() == 0:
            return CompletedTransfer()
        if tensor.numel() < MIN_NUMEL or tensor.dtype == torch.bool:
            return self.base.all_reduce(tensor, what=what)
        way = self.choose(tensor.nbytes)
        if way.tell is None:
            return self.begin(way.name, tensor, what=what)
        self._make_ready(way.name, tensor.nbytes)
        began = time.perf_counter()
        self.begin(way.name, tensor, what=what).wait()
        way.tell(time.perf_counter() - began)
        return CompletedTransfer()

    def begin(self, name: str, tensor: Tensor, *, what: str) -> Transfer:
        """Begin to sum a tensor by this algorithm, or as the back end does, whatever its size."""
        return self.base.all_reduce(tensor, what=what) if name == BACKEND else self._walked(name, tensor, what=what)

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor], *, what: str) -> None:
        self.base.all_gather(tensor, out, what=what)

    def begin_all_gather(self, tensor: Tensor, out: Tensor, *, what: str) -> Transfer:
        return self.base.begin_all_gather(tensor, out, what=what)

    def begin_all_to_all(self, rows: Tensor, out: Tensor, *, what: str) -> Transfer:
        return self.base.begin_all_to_all(rows, out, what=what)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, *, what: str) -> None:
        self.base.reduce_scatter(parts, out, what=what)

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor], *, what: str) -> None:
        self.base.all_to_all(parts, out, what=what)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str = "broadcast") -> None:
        self.base.broadcast(tensor, source=source, what=what)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.base.gather_objects(value)

    def broadcast_object(self, value: Any, *, source: int = 0) -> Any:
        return self.base.broadcast_object(value, source=source)

    def barrier(self) -> None:
        self.base.barrier()

    def close(self) -> None:
        has_ended, near = self._errands.close(), self.near
        self.base.close()
        if near is not None and has_ended:
            near.close()
        elif near is not None:  # a thread that was left behind may still look into that memory
            threading.Thread(target=self._close_later, args=(near,), name="paceline-undertaker", daemon=True).start()

    def _make_ready(self, name: str, num_bytes: int) -> None:
        """Return when neither walks that are under way nor the slowest member take a part of the sum's time."""
        for snapshot_transfer in self._under_way:
            snapshot_transfer.wait()
        if name != BACKEND and (name != "hierarchical" or self.near is None):
            self._program(name, num_bytes)
        self.base.barrier()

    def _walked(self, name: str, tensor: Tensor, *, what: str) -> Transfer:
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        tag = FIRST_TAG + self._num_walks % NUM_TAGS
        self._num_walks += 1
        if tensor.device.type != "cpu":
            return self._enqueue(name, flat, tensor, tag)

        def do(snapshot_transfer: AsyncCollective, aside: ReceiveBuffers) -> None:
            if name == "hierarchical" and self.near is not None:
                self._by_hosts(flat, self.near, snapshot_transfer, aside, tag)
            else:
                self._program_walk(name, flat, snapshot_transfer).run(self._over, aside, tag=tag)
            if flat.data_ptr() != tensor.data_ptr():  # the tensor has holes, and was copied to be flat
                copy_into(tensor, flat.view(tensor.size()))

        snapshot_transfer = self._errands.begin(do, what=f"{what} ({name})")
        self._under_way = [one for one in self._under_way if not one.is_over] + [snapshot_transfer]
        return snapshot_transfer

    def _close_later(self, near: WorkerGroup) -> None:
        self._errands.join()
        near.close()

    def _program(self, name: str, num_bytes: int) -> Program:
        """This member's part of a schedule among all."""
        num_chunks = num_chunks_of(name, num_bytes=num_bytes, num_workers=self.size)
        if (name, num_chunks) not in self._programs:
            schedule = build(name, num_workers=self.size, num_chunks=num_chunks, hosts=self.hosts)
            self._programs[name, num_chunks] = program_of(schedule, self.index)
        return self._programs[name, num_chunks]

    def _program_walk(
        self, name: str, flat: Tensor, snapshot_transfer: AsyncCollective | None = None
    ) -> ScheduleExecution:
        program = self._program(name, flat.nbytes)
        return self._walk(program, flat, range(self.size), snapshot_transfer)

    def _walk(
        self, program: Program, flat: Tensor, peers: Sequence[int], snapshot_transfer: AsyncCollective | None
    ) -> ScheduleExecution:
        def notes(peer: int, number: int) -> None:
            if snapshot_transfer is not None:
                where = f"round {number + 1} of {program.num_rounds}" if number >= 0 else "to take what was sent"
                snapshot_transfer.awaited = f"worker {self._ranks[peer]} ({program.name}, {where})"

        return ScheduleExecution(program=program, flat=flat, peers=peers, notes=notes)

    def _by_hosts(
        self, flat: Tensor, near: WorkerGroup, snapshot_transfer: AsyncCollective, aside: ReceiveBuffers, tag: int
    ) -> None:
        """Sum in this host's memory, between the hosts, and in memory again."""
        snapshot_transfer.awaited = "those of its host"
        near.all_reduce(flat, what=snapshot_transfer.what).wait()
        slices = slices_of(self._teams, flat.numel())
        own = next(team for team in self._teams if self.index in team)
        place = own.index(self.index)
        mine = flat[slice(*slices[place])] if place < len(slices) else flat[:0]
        if place < len(slices) and len(self._teams) > 1:
            peers = [team[place] for team in self._teams]
            self._walk(self._between(peers, mine.nbytes), mine, peers, snapshot_transfer).run(
                self._over, aside, tag=tag
            )
        if near.size > 1:
            _forget(flat, mine)
            snapshot_transfer.awaited = "those of its host"
            near.all_reduce(flat, what=snapshot_transfer.what).wait()

    def _between(self, peers: Sequence[int], num_bytes: int) -> Program:
        name, index = between_hosts(len(peers)), peers.index(self.index)
        num_chunks = num_chunks_of(name, num_bytes=num_bytes, num_workers=len(peers))
        key = f"{name} between hosts", num_chunks
        if key not in self._programs:
            schedule = build(name, num_workers=len(peers), num_chunks=num_chunks)
            self._programs[key] = dataclasses.replace(program_of(schedule, index), name=key[0])
        return self._programs[key]

    def _enqueue(self, name: str, flat: Tensor, tensor: Tensor, tag: int) -> Transfer:
        """Put a walk into a stream of its own, behind what this one has to do."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._program_walk(name, flat).enqueue(self._over, tag=tag)
            if flat.data_ptr() != tensor.data_ptr():
                copy_into(tensor, flat.view(tensor.size()))
            for used in (flat, tensor):
                used.record_stream(self._stream)
            return _StreamTransfer(self._stream.record_event(), tensor)


class _StreamTransfer:
    """A walk in another stream; to wait is to have the current one wait."""

    def __init__(self, event: Any, tensor: Tensor) -> None:
        self._event, self._tensor = event, tensor

    def wait(self) -> None:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._event)


def backend_group_of(group: WorkerGroup) -> Group:
    """Return what moves a group's tensors between two members."""
    while not isinstance(group, Group):
        if isinstance(group, ScheduledGroup):
            group = group.base
        elif isinstance(group, SharedGroup):
            group = group.over
        else:
            raise SyncError("there is no other member to send to, or to receive from")
    return group


@torch.inference_mode()
def _forget(flat: Tensor, kept: Tensor) -> None:
    """Make all numbers 0 but those that are kept: the sum of a host's workers is then what each of them has kept."""
    start = kept.storage_offset() - flat.storage_offset() if len(kept) else 0
    flat[:start].zero_()
    flat[start + len(kept) :].zero_()
