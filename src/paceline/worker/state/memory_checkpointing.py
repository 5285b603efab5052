"""Memory checkpoints: every few steps, between two of them, a worker copies its state into memory that outlives it.

Where a replica is split, no other worker may have what a lost one held. So each worker keeps a copy of its share in
memory that its supervisor holds. When a worker is lost, all restart from these copies, without reading the disk. The
copies are of one step: no worker marks its copy before all have come to that step and copied. So the last copy that all
have marked is complete, and all workers have committed its step.

How often follows from the cost. Each time, all workers exchange how long the copying and the steps have taken. The next
copy is due after so many steps that copying takes at most `SHARE` of the time. Where workers of a host have the same
state, one of them writes for all.

With several hosts, each supervisor replicates its workers' copies to the next host in the background
(`paceline.launch.snapshots.snapshot_replication`). That cost counts as copying does, and no worker writes the next
snapshot before the last one has arrived.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.comm.memory_checkpoint import FIRST_BYTE, MemoryCheckpoint, SnapshotHeader, SnapshotSlot
from paceline.errors import CheckpointError
from paceline.events import Event, Note, StateKept
from paceline.plan.guard import Guard
from paceline.units import bytes_text
from paceline.worker.membership.consensus import RunTogether

__all__ = [
    "MemoryCheckpointer",
    "SnapshotReport",
    "read_state",
    "snapshot_interval",
    "state_bytes",
    "why_no_snapshots",
    "write_state",
]

SHARE = 0.01  # of the time, at most
LEAST = 10  # steps from one to the next, where the plan does not say
FIRST = 2  # before the first one: by then optimizers have their state, and steps take what they will
ROOM = 0.5  # of the memory that is free, for both slots of all workers
ALIGNED = 64
N = TypeVar("N", int, float)


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What one worker reports of a snapshot."""

    host: str
    seconds: float  # that the copying has taken
    step_s: float  # a step, since the one before
    num_bytes: int
    free_bytes: int | None  # of the host's memory; None: not known
    held_bytes: int = 0  # that its slots have already, from before a restart
    refusal: str = ""  # why it could not be taken
    travel_s: float = 0.0  # that the one before took to the next host
    work_s: float = 0.0  # for which it kept a core of its host busy
    is_late: bool = False  # it has not arrived yet


class MemoryCheckpointer:
    """Keeps one worker's state in its memory checkpoint. All workers call `keep`, at the same places."""

    def __init__(
        self,
        memory_checkpoint: MemoryCheckpoint | None,
        guard: Guard,
        *,
        is_split: bool,
        group: WorkerGroup,
        together: RunTogether,
        state: Callable[[], dict[str, Any]],
        done: Callable[[], None],
        host: str,
        free_bytes: Callable[[], int | None],
        emit: Callable[[Event], None],
        report_snapshot: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`state()` returns everything that this worker has, live, and `done()` is called when it was read. `is_split`:
        it differs from other workers'. `report_snapshot()` informs the supervisor of one more complete snapshot.
        """
        self._every = guard.snapshot_every or LEAST
        self._is_measured = guard.snapshot_every is None
        self._follows = guard.on_spike == "rollback"  # both kinds of snapshots are of the same steps then
        self._is_on = memory_checkpoint is not None and guard.snapshot_every != 0
        # The plan wants snapshots that cannot be taken, and that was not reported yet.
        self._is_unused = memory_checkpoint is None and bool(guard.snapshot_every) and not self._follows
        self._checkpoint, self._is_split = memory_checkpoint, is_split
        self._group, self._together, self._state, self._done, self._host = group, together, state, done, host
        self._free_bytes, self._emit, self._report_snapshot, self._clock = free_bytes, emit, report_snapshot, clock
        self._kept_at = 0  # the step of the newest one, or with which this start began
        self._has_kept = False
        self._not_before = 0  # this step: the last one was still on its way to the next host
        self._has_noted_late = False
        self._seen_at = clock()  # when `keep` was called last
        self._timed_since: tuple[int, float] | None = None  # a step, and its end: only steps came since

    @property
    def is_on(self) -> bool:
        """Whether there will be snapshots."""
        return self._is_on

    @property
    def _writes(self) -> bool:
        """Whether this worker's copy is wanted. A host whose system has no such memory gives none."""
        return self._checkpoint is not None and (self._is_split or self._group.index == 0)

    def state_dict(self) -> dict[str, Any]:
        """For a newcomer, which has to come to the same snapshots."""
        kept = self._kept_at, self._has_kept, self._not_before
        return {"is_on": self._is_on, "every": self._every, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave elsewhere."""
        self._is_on, self._every, self._is_unused = state["is_on"], state["every"], False
        self._kept_at, self._has_kept, self._not_before = state["kept"]

    def members_changed(self) -> None:
        """The time since the last snapshot is not that of steps alone: it is measured anew."""
        self._timed_since = None

    def begin(self, step: int) -> None:
        """The run goes on from a step."""
        self._kept_at = step

    def keep(self, step: int, *, is_rollback_kept: bool) -> None:
        """Between two steps: take a snapshot, where one is due. `is_rollback_kept`: one for rollbacks was taken now."""
        now = self._clock()
        last_s, self._seen_at = now - self._seen_at, now
        self._note_unused()
        if not self._is_on:
            return
        if not self._is_due(step, is_rollback_kept):
            self._timed_since = self._timed_since or (step, now)
            return
        since, began = self._timed_since or (step, now)
        if not self._has_arrived(step):
            return
        self._take(step, (now - began) / (step - since) if self._has_kept and step > since else last_s)
        self._kept_at, self._has_kept = step, True
        self._seen_at = self._clock()
        self._timed_since = step, self._seen_at

    def _note_unused(self) -> None:
        if self._is_unused and self._group.index == 0:
            text = "snapshots outlive workers where Paceline's own supervisor starts them"
            self._emit(Note(text=f"Guard(snapshot_every={self._every}) is not used: {text}"))
        self._is_unused = False

    def _is_due(self, step: int, is_rollback_kept: bool) -> bool:
        if self._follows:
            return is_rollback_kept
        first = FIRST if self._is_measured and not self._has_kept else self._every
        return step - self._kept_at >= first and step >= self._not_before

    def _has_arrived(self, step: int) -> bool:
        """Whether the last snapshots of all workers are on the next host; where not, this one is left out."""
        if not self._has_kept:
            return True
        is_late = self._checkpoint is not None and not self._checkpoint.is_replicated
        own = SnapshotReport(self._host, 0.0, 0.0, 0, None, is_late=is_late)
        reports: list[SnapshotReport] = self._together(lambda: self._group.gather_objects(own))
        if not any(one.is_late for one in reports):
            return True
        self._not_before = step + max(1, self._every // 4)
        if self._group.index == 0 and not self._has_noted_late:
            hosts = ", ".join(dict.fromkeys(one.host for one in reports if one.is_late))
            self._emit(
                Note(
                    text=f"no snapshot in memory after step {step}: the last one, of step {self._kept_at}, is still on "
                    f"its way from host {hosts} to the next one; this is reported once"
                )
            )
        self._has_noted_late = True
        return False

    def _take(self, step: int, step_s: float) -> None:
        memory_checkpoint = self._checkpoint if self._writes else None
        state = self._state() if memory_checkpoint is not None else {}
        num_bytes = state_bytes(state) if memory_checkpoint is not None else 0
        if not self._has_kept and not self._have_room(memory_checkpoint, num_bytes):
            return
        slot, mark, replication_status, why, began = None, None, None, "", self._clock()
        if memory_checkpoint is not None:
            slot = memory_checkpoint.next
            try:
                replication_status = (
                    None if memory_checkpoint.newest is None else memory_checkpoint.newest.replication_status
                )
                mark = write_state(slot, state, step=step, is_for_all=not self._is_split)
            except OSError as error:
                why = f"{bytes_text(num_bytes)} of memory for a copy: {error.strerror}"
            self._done()
        own = SnapshotReport(self._host, self._clock() - began, step_s, num_bytes, None, refusal=why)
        if replication_status is not None:
            own = dataclasses.replace(own, travel_s=replication_status.took_s, work_s=replication_status.work_s)
        reports: list[SnapshotReport] = self._together(lambda: self._group.gather_objects(own))
        if not self._go_on(reports):
            return
        if slot is not None and mark is not None:
            slot.commit(mark)
            if self._report_snapshot is not None:
                self._report_snapshot()
        if self._is_measured:
            self._every = snapshot_interval(reports)
        if self._group.index == 0:
            self._emit(
                StateKept(
                    step=step,
                    every=self._every,
                    seconds=max(one.seconds for one in reports),
                    num_bytes=max(room_by_host(reports).values()),
                    travel_s=max(one.travel_s for one in reports),
                )
            )

    def _have_room(self, memory_checkpoint: MemoryCheckpoint | None, num_bytes: int) -> bool:
        """Before the first one: reserve the memory of both slots. Returns whether all hosts have it."""
        held = sum(slot.num_bytes for slot in memory_checkpoint.slots) if memory_checkpoint is not None else 0
        own = SnapshotReport(self._host, 0.0, 0.0, num_bytes, self._free_bytes(), held)
        if not self._go_on(self._together(lambda: self._group.gather_objects(own))):
            return False
        why = ""
        try:
            for slot in memory_checkpoint.slots if memory_checkpoint is not None else ():
                slot.reserve(FIRST_BYTE + num_bytes)
        except OSError as error:
            why = f"{bytes_text(2 * num_bytes)} of memory for two copies: {error.strerror}"
        own = dataclasses.replace(own, refusal=why, free_bytes=None)
        return self._go_on(self._together(lambda: self._group.gather_objects(own)))

    def _go_on(self, reports: Sequence[SnapshotReport]) -> bool:
        why = why_no_snapshots(reports)
        if why:
            self._is_on = False
            self._free_slots()
            if self._group.index == 0:
                text = f"no snapshots in memory, so a lost worker takes the run back to its newest checkpoint: {why}"
                self._emit(Note(text=text))
        return not why

    def _free_slots(self) -> None:
        """Nothing will be written any more: return the memory of slots that hold no snapshot."""
        for slot in self._checkpoint.slots if self._checkpoint is not None else ():
            if slot.mark is None:
                slot.give_back()


def snapshot_interval(reports: Sequence[SnapshotReport]) -> int:
    """Return after how many steps the next snapshot is due, by the reports of all workers on this one.

    Replication keeps a core busy here, and another one on the next host for as long.
    """
    step_s = max(min(one.step_s for one in reports), 1e-9)
    work_s = 2 * max(_by_host(reports, lambda one: one.work_s).values())
    return max(LEAST, math.ceil((max(one.seconds for one in reports) + work_s) / (SHARE * step_s)))


def why_no_snapshots(reports: Sequence[SnapshotReport]) -> str:
    """Return why there can be no snapshots; "" where there can."""
    for one in reports:
        if one.refusal:
            return f"host {one.host} does not give {one.refusal}"
    rooms, held = room_by_host(reports), _with_anothers(_by_host(reports, lambda one: one.held_bytes))
    for host, num_bytes in rooms.items():
        free = min((one.free_bytes for one in reports if one.host == host and one.free_bytes is not None), default=None)
        if free is not None:
            free += held[host]
        if free is not None and num_bytes > ROOM * free:
            whose = f"all that the workers of host {host}" + (" and of the one before it" if len(rooms) > 1 else "")
            return (
                f"two copies of {whose} hold take {bytes_text(num_bytes)}, more than half of the {bytes_text(free)} "
                "that are free there"
            )
    return ""


def room_by_host(reports: Sequence[SnapshotReport]) -> dict[str, int]:
    """Return the bytes of each host's memory that snapshots take: two of its own workers, and, where there are several
    hosts, two of another one's, whichever that is."""
    return {host: 2 * both for host, both in _with_anothers(_by_host(reports, lambda one: one.num_bytes)).items()}


def _with_anothers(own: Mapping[str, int]) -> dict[str, int]:
    """Each host's bytes, and those of another one that lie there too: the largest, since any may be the one before."""
    return {
        host: num_bytes + max((other for name, other in own.items() if name != host), default=0)
        for host, num_bytes in own.items()
    }


def _by_host(reports: Sequence[SnapshotReport], value: Callable[[SnapshotReport], N]) -> dict[str, N]:
    """Sums over the workers of each host."""
    found: dict[str, N] = {}
    for one in reports:
        found[one.host] = found[one.host] + value(one) if one.host in found else value(one)
    return found


# What is in a slot: the tensors one after the other, then an index of where they are, and all plain values.


def state_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of a state's tensors, as they lie in a slot."""
    return sum(_room(tensor) for tensor in state["tensors"].values())


def write_state(slot: SnapshotSlot, state: Mapping[str, Any], *, step: int, is_for_all: bool) -> SnapshotHeader:
    """Copy a state into a slot; returns the mark with which it will count. OSError where there is no memory."""
    tensors: Mapping[str, Tensor] = state["tensors"]
    places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
    end = FIRST_BYTE
    for name, tensor in tensors.items():
        places[name] = (end, tensor.shape, tensor.dtype)
        end += _room(tensor)
    rest = pickle.dumps({**state, "tensors": places}, protocol=pickle.HIGHEST_PROTOCOL)
    slot.clear()
    slot.reserve(end + len(rest))
    for name, tensor in tensors.items():
        slot.write(places[name][0], _bytes_of(tensor.cpu().contiguous()))
    slot.write(end, rest)
    return SnapshotHeader(step=step, index=end, index_bytes=len(rest), is_for_all=is_for_all)


def read_state(slot: SnapshotSlot) -> dict[str, Any]:
    """Return the state that a slot holds; its tensors are read one by one, when they are used.

    Raises CheckpointError where the slot holds nothing that counts.
    """
    mark = slot.mark
    if mark is None:
        raise CheckpointError("the snapshot in memory that this worker was to begin with is not there any more")
    rest = bytearray(mark.index_bytes)
    slot.read_into(mark.index, memoryview(rest))
    state = pickle.loads(rest)  # written by a worker of this very run; where it came from another host, it was signed
    return {**state, "tensors": _StoredTensors(slot, mark, state["tensors"])}


class _StoredTensors(Mapping[str, Tensor]):
    """The tensors of a slot, read afresh each time."""

    def __init__(
        self, slot: SnapshotSlot, mark: SnapshotHeader, places: Mapping[str, tuple[int, torch.Size, torch.dtype]]
    ) -> None:
        self._slot, self._mark, self._places = slot, mark, places

    def __getitem__(self, name: str) -> Tensor:
        offset, shape, dtype = self._places[name]
        tensor = torch.empty(shape, dtype=dtype)
        self._slot.read_into(offset, _bytes_of(tensor))
        if self._slot.mark != self._mark:
            raise CheckpointError(f"{name} was prepared too late: the snapshot in memory that held it is overwritten")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # a buffer, which its type stub lacks
    return memoryview(raw)
