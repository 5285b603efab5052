"""The flight recorder: what a worker is doing, in a small file that others can read even while it hangs or after its
death.

It holds the newest collectives, which of them the worker waits for, how many it has entered in each group, and its
current phase. All of it lies in memory mapped from a file. Writing copies a few bytes and flushes nothing, and the
kernel keeps the content whatever happens to the process. Times are of the host's monotonic clock, which its processes
share.

    header     which worker this is; what it does now
    groups     one place each: the run's own group first, then those that the user's code has made
    calls      NUM_CALLS places, used in turn

A call has a *serial* (counted by this worker) and a *sequence* (counted in its group: the same on all members as long
as they make the same calls). Readers may come at any moment, and a writer may be suspended in the middle of a place for
a long time. So a call is packed in place between two copies of its serial, and counts only if both are there. All other
fields are packed elsewhere and copied, so each number is the old or the new one. No torch is imported here, because
supervisors read these files too.
"""

from __future__ import annotations

import dataclasses
import mmap
import operator
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.comm.call_site import caller_line
from paceline.regular_files import open_regular

__all__ = [
    "APART",
    "FILE_NAME",
    "HELD",
    "STACKS_NAME",
    "STACK_SIGNAL",
    "FlightRecord",
    "FlightRecorder",
    "RecordedCollective",
    "RecordedGroup",
    "WorkTotals",
    "read_flight_record",
]

FILE_NAME = "doing"  # in a worker's directory
APART = "apart"  # the run's own group, of this worker alone, while it needs no other one
HELD = "held"  # the kind of a call that is an answer of parameter servers, which they hold back
STACKS_NAME = "stacks"  # beside it: what a worker writes when it gets the signal
# A real-time signal, where there are any: the usual ones are for the user's program, and for batch systems.
STACK_SIGNAL: int = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
MAGIC = b"PACERNG1"
IDENTITY = struct.Struct("<8sIId")  # magic, worker, pid, its time limit
NOW_AT, NOW = 64, struct.Struct("<QQQQQ32s")  # last change, serial waited for or 0, since, phase since, step, phase
LINE_AT, LINE_BYTES = 160, 96  # the user's line when the phase began
STEPS_AT, NUM_STEPS = 256, 16  # seconds that the newest steps took, used in turn; 0: not yet
WORK_AT, WORK = 384, struct.Struct("<QQ4d")  # committed steps, micro-batches in them, and their seconds by phase
GROUP_AT, GROUP = 512, struct.Struct("<IIQ40s200s")  # id, size, calls entered, name, members
NUM_GROUPS = 14
CALLS_AT, CALL = 4096, struct.Struct("<QQQQqI12s40s160s124sQ")
NUM_CALLS = 64
NUM_BYTES = CALLS_AT + NUM_CALLS * CALL.size
ENTERED_AT = 8  # in a group's place
PHASES = ("data", "compute", "communication", "optimizer")  # of a step's seconds
NUM_TEXTS = 4096  # encoded texts that are kept: a program has few, unless it makes them up as it goes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCollective:
    """One collective that a worker has entered."""

    serial: int
    sequence: int  # in its group, from 1
    group: int
    kind: str  # "all_reduce"; of the user's own calls "torch.distributed.all_reduce"
    what: str
    dtype: str
    numel: int
    step: int
    line: str  # the user's, "" where not known
    age_s: float  # since it was entered


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
    """A group that a worker is in, and how many collectives it has entered there."""

    id: int
    name: str
    members: tuple[int, ...]  # worker ranks
    entered: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkTotals:
    """The work of a worker since it began; seconds of waiting for others count as communication."""

    steps: int = 0
    micros: int = 0  # micro-batches that it ran itself
    data_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    optimizer_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlightRecord:
    """The content of a flight recorder at one moment."""

    worker: int
    pid: int
    limit_s: float  # Job.timeout_s, as the worker knows it
    step: int
    steps_s: tuple[float, ...]  # what the newest ones took, in no order
    phase: str
    phase_s: float
    line: str
    work: WorkTotals
    idle_s: float  # since anything changed
    waits_for: int  # serial; 0: for nothing
    waited_s: float
    groups: tuple[RecordedGroup, ...]  # the run's own first
    calls: tuple[RecordedCollective, ...]  # oldest first


class FlightRecorder:
    """The writing end, in the worker. Several threads may enter collectives; the newest one determines what the worker
    waits for.
    """

    def __init__(self, memory: mmap.mmap, *, worker: int, limit_s: float) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._serial, self._step, self._step_ns = 0, 0, 0
        self._phase, self._phase_ns, self._phase_line = b"", time.monotonic_ns(), b""
        self._work: tuple[float, ...] = (0, 0, 0.0, 0.0, 0.0, 0.0)
        self._groups: dict[str, _FollowedGroup] = {}
        self._main: _FollowedGroup | None = None
        self._texts: dict[object, bytes] = {}
        IDENTITY.pack_into(memory, 0, MAGIC, worker, os.getpid(), limit_s)
        self._now(0)

    @classmethod
    def create(cls, path: Path, *, worker: int, limit_s: float) -> FlightRecorder:
        """Make the file anew for this process; `limit_s` is how long the worker waits for others."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with open(partial, "w+b") as file:
            file.write(bytes(NUM_BYTES))  # not a hole: a full disk is an error here, and not a SIGBUS later
            file.flush()
            recorder = cls(mmap.mmap(file.fileno(), NUM_BYTES), worker=worker, limit_s=limit_s)
        partial.replace(path)
        return recorder

    @classmethod
    def unread(cls) -> FlightRecorder:
        """Return a recorder that is never read, for workers without a directory."""
        return cls(mmap.mmap(-1, NUM_BYTES), worker=0, limit_s=0.0)

    def join(self, name: str, members: Sequence[int], *, is_main: bool = False) -> None:
        """Record that this worker is in a group of these workers. `is_main`: it replaces the run's own group."""
        with self._lock:
            if is_main:
                self._groups = {key: group for key, group in self._groups.items() if group is not self._main}
                place = 0
            else:
                taken = {group.place: key for key, group in self._groups.items()}
                place = next((number for number in range(1, NUM_GROUPS) if number not in taken), 1)
                self._groups.pop(taken.get(place, ""), None)  # of so many groups, one is no longer followed
            group = _FollowedGroup(place, zlib.crc32(name.encode()))
            at = GROUP_AT + place * GROUP.size
            self._put(at, GROUP.pack(group.id, len(members), 0, name.encode()[:40], spans(members)[:200]))
            self._groups[name] = group
            if is_main:
                self._main = group
            self._now(0)

    def part(self, name: str) -> None:
        """Record that this worker has left a group."""
        with self._lock:
            group = self._groups.pop(name, None)
            if group is not None:
                self._put(GROUP_AT + group.place * GROUP.size, bytes(GROUP.size))

    def is_in(self, name: str) -> bool:
        """Whether this worker has joined a group of that name."""
        return name in self._groups

    def enter(
        self,
        kind: str,
        what: str,
        *,
        dtype: object = None,
        numel: int = 0,
        group: str | None = None,
        is_of_phase: bool = False,
    ) -> int:
        """Record that this worker enters a collective (of the run's own group by default); return the call's serial.

        `is_of_phase`: no user code has called it since the phase began, so the phase's line is used. Looking it up
        would cost as much as all the rest of this.
        """
        line = self._phase_line if is_of_phase else self._text(caller_line())
        now = time.monotonic_ns()
        with self._lock:
            self._serial = serial = self._serial + 1
            one = self._main if group is None else self._groups.get(group)
            if one is None:
                one = _FollowedGroup(-1, 0)
            one.entered = sequence = one.entered + 1
            CALL.pack_into(
                self._memory,
                CALLS_AT + serial % NUM_CALLS * CALL.size,
                serial,
                sequence,
                self._step,
                now,
                numel,
                one.id,
                b"" if dtype is None else self._text(dtype).removeprefix(b"torch."),
                self._text(kind),
                self._text(what),
                line,
                serial,
            )
            if one.place >= 0:
                self._put(GROUP_AT + one.place * GROUP.size + ENTERED_AT, _NUMBER.pack(sequence))
            self._put(NOW_AT, _NUMBER.pack(now))
        return serial

    def wait(self, serial: int) -> None:
        """Record that this worker only waits until the call is over."""
        now = time.monotonic_ns()
        self._put(NOW_AT, _WAIT.pack(now, serial, now))

    def leave(self) -> None:
        """Record that it waits no longer."""
        self._put(NOW_AT, _WAIT.pack(time.monotonic_ns(), 0, 0))

    def begin(self, phase: str, step: int) -> None:
        """Record what this worker does from now on, and for which step."""
        line = self._text(caller_line())
        with self._lock:
            self._phase, self._phase_ns, self._phase_line = self._text(phase), time.monotonic_ns(), line
            if step > self._step:
                self._note_step(step)
            self._now(0)
            self._put(LINE_AT, _LINE.pack(line))

    def add_work(self, micros: int, seconds: Mapping[str, float]) -> None:
        """Record a committed step."""
        added = (1, micros, *(seconds[phase] for phase in PHASES))
        self._work = tuple(map(operator.add, self._work, added))
        self._put(WORK_AT, WORK.pack(*self._work))

    def _now(self, waits_for: int) -> None:
        now = time.monotonic_ns()
        self._put(NOW_AT, NOW.pack(now, waits_for, 0, self._phase_ns, self._step, self._phase))

    def _note_step(self, step: int) -> None:
        """The first step is not counted, because it includes the program's preparations."""
        if self._step_ns and self._step > 0:
            seconds = (self._phase_ns - self._step_ns) / 1e9 / (step - self._step)
            self._put(STEPS_AT + step % NUM_STEPS * _SECONDS.size, _SECONDS.pack(seconds))
        self._step, self._step_ns = step, self._phase_ns

    def _put(self, at: int, data: bytes) -> None:
        self._memory[at : at + len(data)] = data

    def _text(self, thing: object) -> bytes:
        """Return the bytes of a text that repeats often."""
        found = self._texts.get(thing)
        if found is None:
            if len(self._texts) >= NUM_TEXTS:
                self._texts.clear()
            found = self._texts[thing] = str(thing).encode(errors="backslashreplace")
        return found


def read_flight_record(path: Path, *, with_calls: bool = True) -> FlightRecord | None:
    """Return what a worker's file says; None if it is missing or no flight recorder.

    `with_calls=False` omits the calls, at a tenth of the cost.
    """
    num_bytes = NUM_BYTES if with_calls else CALLS_AT
    try:
        with open_regular(path, buffering=0) as file:
            data = file.read(num_bytes)
    except OSError:  # not there yet, or on its way out
        return None
    if len(data) < num_bytes or not data.startswith(MAGIC):
        return None
    now = time.monotonic_ns()
    _, worker, pid, limit_s = IDENTITY.unpack_from(data)
    changed, waits_for, since, phase_since, step, phase = NOW.unpack_from(data, NOW_AT)
    return FlightRecord(
        worker=worker,
        pid=pid,
        limit_s=limit_s,
        step=step,
        steps_s=tuple(filter(None, struct.unpack_from(f"<{NUM_STEPS}d", data, STEPS_AT))),
        phase=_decoded(phase),
        phase_s=_age_s(phase_since, now),
        line=_decoded(data[LINE_AT : LINE_AT + LINE_BYTES]),
        work=_work(data),
        idle_s=_age_s(changed, now),
        waits_for=waits_for,
        waited_s=_age_s(since, now) if waits_for else 0.0,
        groups=tuple(_groups(data)),
        calls=tuple(sorted(_calls(data, now), key=lambda call: call.serial)) if with_calls else (),
    )


def spans(numbers: Iterable[int]) -> bytes:
    """Return "0-3,7", shorter than a list of as many numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs).encode()


@dataclasses.dataclass(slots=True)
class _FollowedGroup:
    place: int  # in the file; -1: not followed
    id: int
    entered: int = 0


def _work(data: bytes) -> WorkTotals:
    steps, micros, data_s, compute_s, communication_s, optimizer_s = WORK.unpack_from(data, WORK_AT)
    return WorkTotals(
        steps=steps,
        micros=micros,
        data_s=data_s,
        compute_s=compute_s,
        communication_s=communication_s,
        optimizer_s=optimizer_s,
    )


def _groups(data: bytes) -> Iterable[RecordedGroup]:
    for place in range(NUM_GROUPS):
        number, size, entered, name, members = GROUP.unpack_from(data, GROUP_AT + place * GROUP.size)
        found = _members(_decoded(members))
        if size and len(found) == size:  # otherwise there are too many to be written down
            yield RecordedGroup(id=number, name=_decoded(name), members=found, entered=entered)


def _calls(data: bytes, now: int) -> Iterable[RecordedCollective]:
    for place in range(NUM_CALLS):
        fields = CALL.unpack_from(data, CALLS_AT + place * CALL.size)
        serial, sequence, step, entered, numel, group, dtype, kind, what, line, end = fields
        if serial and serial == end:
            yield RecordedCollective(
                serial=serial,
                sequence=sequence,
                group=group,
                kind=_decoded(kind),
                what=_decoded(what),
                dtype=_decoded(dtype),
                numel=numel,
                step=step,
                line=_decoded(line),
                age_s=_age_s(entered, now),
            )


def _members(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _decoded(text: bytes) -> str:
    return text.rstrip(b"\0").decode("utf-8", errors="replace")


def _age_s(since: int, now: int) -> float:
    """How long ago that was; 0: it is not written yet."""
    return max(0, now - since) / 1e9 if since else 0.0


_SECONDS = struct.Struct("<d")
_NUMBER, _WAIT, _LINE = struct.Struct("<Q"), struct.Struct("<QQQ"), struct.Struct(f"<{LINE_BYTES}s")
