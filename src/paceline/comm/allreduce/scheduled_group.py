"""A process group with Paceline's own all-reduce algorithms, as NCCL has ring and tree; other collectives go to the
group below.

An algorithm may be on trial. Then all members begin the sum together, the call blocks until it is done, and the time is
reported to the selection (`comm/algorithm_selection.py`).

If the CPU workers of a host share memory (`comm/shared_memory/shared_group.py`), the hierarchical algorithm reduces
there first. Then it runs the schedule between hosts, with one slice of the tensor for each of the first workers of a
host, and distributes the result in memory again. Without shared memory, everything is sent.

Tensors below MIN_NUMEL (a step's vote, a barrier) go to the back end. They are nothing but latency, and must not wait
for a thread.
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
from paceline.comm.devices.routed_group import RoutedGroup
from paceline.comm.group import CompletedTransfer, Group, Transfer, WorkerGroup, copy_into
from paceline.comm.shared_memory.shared_group import SharedGroup
from paceline.errors import SyncError
from paceline.schedule.allreduce.build import between_hosts, build, num_chunks_of
from paceline.schedule.allreduce.hierarchical import hosts_of, slices_of
from paceline.schedule.allreduce.worker_program import Program, program_of

__all__ = ["BACKEND", "MIN_NUMEL", "ScheduledGroup", "SelectedAlgorithm", "backend_group_of"]

BACKEND = "backend"  # in place of an algorithm: the back end's own all-reduce
MIN_NUMEL = 64  # fewer numbers are not worth a schedule
NUM_THREADS = 2
FIRST_TAG, NUM_TAGS = 1 << 16, 1 << 20  # apart from the tags of other messages


@dataclasses.dataclass(frozen=True, slots=True)
class SelectedAlgorithm:
    """How a tensor is summed."""

    name: str  # an algorithm's, or BACKEND
    report: Callable[[float], None] | None = None  # of an algorithm on trial: called with the seconds that it took


class ScheduledGroup:
    """Two or more workers; `choose(bytes)` selects the algorithm for a tensor, the same on all of them.

    `base` does all other collectives. `hosts[k]` is the host of member k. `host_group` is the shared-memory group of
    this worker's host, for the exclusive use of this group; None unless every host with several workers has one.
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
        host_group: WorkerGroup | None = None,
    ) -> None:
        self.index, self.size = base.index, base.size
        self.base, self.hosts, self.host_group = base, tuple(hosts), host_group
        self.choose = choose
        self._transport, self._ranks = backend_group_of(base), tuple(ranks)
        # Only one thread at a time may use shared memory.
        num_threads = NUM_THREADS if host_group is None else 1
        self._threads = CollectiveThreads(num_threads=num_threads, timeout_s=timeout_s, check=check, lost=lost)
        self._programs: dict[tuple[str, int], Program] = {}
        self._host_members = hosts_of(self.hosts)
        self._num_begun = 0
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
        selected = self.choose(tensor.nbytes)
        if selected.report is None:
            return self.begin(selected.name, tensor, what=what)
        self._make_ready(selected.name, tensor.nbytes)
        began = time.perf_counter()
        self.begin(selected.name, tensor, what=what).wait()
        selected.report(time.perf_counter() - began)
        return CompletedTransfer()

    def begin(self, name: str, tensor: Tensor, *, what: str) -> Transfer:
        """Begin to sum a tensor of any size by this algorithm."""
        if name == BACKEND:
            return self.base.all_reduce(tensor, what=what)
        return self._begin_schedule(name, tensor, what=what)

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

    def settle(self) -> None:
        self.base.settle()

    def close(self) -> None:
        has_ended, host_group = self._threads.close(), self.host_group
        self.base.close()
        if host_group is not None and has_ended:
            host_group.close()
        elif host_group is not None:  # an abandoned thread may still read that memory
            threading.Thread(target=self._close_later, args=(host_group,), name="paceline-close", daemon=True).start()

    def _make_ready(self, name: str, num_bytes: int) -> None:
        """Wait for earlier sums and for the slowest member, so that neither is part of the trial's time."""
        for collective in self._under_way:
            collective.wait()
        if name != BACKEND and (name != "hierarchical" or self.host_group is None):
            self._program(name, num_bytes)
        self.base.barrier()

    def _begin_schedule(self, name: str, tensor: Tensor, *, what: str) -> Transfer:
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        tag = FIRST_TAG + self._num_begun % NUM_TAGS
        self._num_begun += 1
        if tensor.device.type != "cpu":
            return self._enqueue(name, flat, tensor, tag)

        def do(collective: AsyncCollective, buffers: ReceiveBuffers) -> None:
            if name == "hierarchical" and self.host_group is not None:
                self._reduce_by_hosts(flat, self.host_group, collective, buffers, tag)
            else:
                self._execution(name, flat, collective).run(self._transport, buffers, tag=tag)
            if flat.data_ptr() != tensor.data_ptr():  # the tensor is not contiguous, and was copied
                copy_into(tensor, flat.view(tensor.size()))

        collective = self._threads.begin(do, what=f"{what} ({name})")
        self._under_way = [one for one in self._under_way if not one.is_over] + [collective]
        return collective

    def _close_later(self, host_group: WorkerGroup) -> None:
        self._threads.join()
        host_group.close()

    def _program(self, name: str, num_bytes: int) -> Program:
        """Return this member's part of a schedule among all members."""
        num_chunks = num_chunks_of(name, num_bytes=num_bytes, num_workers=self.size)
        if (name, num_chunks) not in self._programs:
            schedule = build(name, num_workers=self.size, num_chunks=num_chunks, hosts=self.hosts)
            self._programs[name, num_chunks] = program_of(schedule, self.index)
        return self._programs[name, num_chunks]

    def _execution(self, name: str, flat: Tensor, collective: AsyncCollective | None = None) -> ScheduleExecution:
        program = self._program(name, flat.nbytes)
        return self._execution_among(program, flat, range(self.size), collective)

    def _execution_among(
        self, program: Program, flat: Tensor, peers: Sequence[int], collective: AsyncCollective | None
    ) -> ScheduleExecution:
        def report_wait(peer: int, number: int) -> None:
            if collective is not None:
                where = f"round {number + 1} of {program.num_rounds}" if number >= 0 else "to take what was sent"
                collective.awaited = f"worker {self._ranks[peer]} ({program.name}, {where})"

        return ScheduleExecution(program=program, flat=flat, peers=peers, report_wait=report_wait)

    def _reduce_by_hosts(
        self, flat: Tensor, host_group: WorkerGroup, collective: AsyncCollective, buffers: ReceiveBuffers, tag: int
    ) -> None:
        """Sum in this host's memory, between the hosts, and in memory again."""
        collective.awaited = "other workers of its host"
        host_group.all_reduce(flat, what=collective.what).wait()
        slices = slices_of(self._host_members, flat.numel())
        own = next(members for members in self._host_members if self.index in members)
        place = own.index(self.index)
        mine = flat[slice(*slices[place])] if place < len(slices) else flat[:0]
        if place < len(slices) and len(self._host_members) > 1:
            peers = [members[place] for members in self._host_members]
            self._execution_among(self._between(peers, mine.nbytes), mine, peers, collective).run(
                self._transport, buffers, tag=tag
            )
        if host_group.size > 1:
            _zero_outside(flat, mine)
            collective.awaited = "other workers of its host"
            host_group.all_reduce(flat, what=collective.what).wait()

    def _between(self, peers: Sequence[int], num_bytes: int) -> Program:
        name, index = between_hosts(len(peers)), peers.index(self.index)
        num_chunks = num_chunks_of(name, num_bytes=num_bytes, num_workers=len(peers))
        key = f"{name} between hosts", num_chunks
        if key not in self._programs:
            schedule = build(name, num_workers=len(peers), num_chunks=num_chunks)
            self._programs[key] = dataclasses.replace(program_of(schedule, index), name=key[0])
        return self._programs[key]

    def _enqueue(self, name: str, flat: Tensor, tensor: Tensor, tag: int) -> Transfer:
        """Enqueue the sum in a CUDA stream of its own, after the current stream's work so far."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._execution(name, flat).enqueue(self._transport, tag=tag)
            if flat.data_ptr() != tensor.data_ptr():
                copy_into(tensor, flat.view(tensor.size()))
            for used in (flat, tensor):
                used.record_stream(self._stream)
            return _StreamTransfer(self._stream.record_event(), tensor)


class _StreamTransfer:
    """A sum in another CUDA stream; `wait` makes the current stream wait for it."""

    def __init__(self, event: Any, tensor: Tensor) -> None:
        self._event, self._tensor = event, tensor

    def wait(self) -> None:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._event)


def backend_group_of(group: WorkerGroup) -> Group:
    """Return the group at the bottom, which sends tensors between two members."""
    while not isinstance(group, Group):
        if not isinstance(group, (ScheduledGroup, SharedGroup, RoutedGroup)):
            raise SyncError("there is no other member to send to, or to receive from")
        group = group.base
    return group


@torch.inference_mode()
def _zero_outside(flat: Tensor, kept: Tensor) -> None:
    """Set all numbers to 0 except `kept`: the sum over a host's workers then consists of what each of them kept."""
    start = kept.storage_offset() - flat.storage_offset() if len(kept) else 0
    flat[:start].zero_()
    flat[start + len(kept) :].zero_()
