"""What the workers of this host are doing, read from outside: their rings, and what the system says of their processes.

A worker's `Doing` is plain data: it travels from the other hosts to the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.comm.ring import FILE_NAME, Call, GroupEntry, Work, read_ring

__all__ = ["Call", "Doing", "GroupEntry", "Work", "look", "process_state", "run_delay_s"]

STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """One worker at one moment."""

    worker: int
    host: str
    pid: int
    limit_s: float  # how long a worker may wait for the others
    state: str  # "running" | "stopped" (SIGSTOP, a debugger) | "gone"
    step: int
    steps_s: tuple[float, ...]  # what its newest ones took
    phase: str
    phase_s: float
    line: str  # of the user's, when the phase began
    work: Work
    run_delay_s: float | None  # see `run_delay_s`
    idle_s: float  # since anything changed in its ring
    waits_for: int  # serial of a call; 0: for nothing
    waited_s: float
    groups: tuple[GroupEntry, ...]  # the run's own first
    calls: tuple[Call, ...]  # the newest ones, oldest first

    def entered(self, group: int) -> int:
        """How many collectives it has entered in a group; 0 where it is not in it."""
        return next((entry.entered for entry in self.groups if entry.id == group), 0)

    def call(self, group: int, sequence: int) -> Call | None:
        """The call with this number in a group; None where it was long ago, or has not come."""
        return next((call for call in self.calls if call.group == group and call.sequence == sequence), None)

    @property
    def waiting(self) -> Call | None:
        """The call that it waits for."""
        return next((call for call in self.calls if call.serial == self.waits_for), None) if self.waits_for else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Doing:
        """Read it back; raises TypeError or KeyError where it is not one."""
        fields = dict(data)
        fields["steps_s"] = tuple(fields["steps_s"])
        fields["groups"] = tuple(
            GroupEntry(id=one["id"], name=one["name"], members=tuple(one["members"]), entered=one["entered"])
            for one in data["groups"]
        )
        fields["work"] = Work(**fields["work"])
        fields["calls"] = tuple(Call(**one) for one in data["calls"])
        return cls(**fields)


def look(worker_dir: Path, worker: int, *, host: str, with_calls: bool = True) -> Doing | None:
    """Return what a worker of this host does; None where it has not begun to say so."""
    image = read_ring(worker_dir / FILE_NAME, with_calls=with_calls)
    if image is None or image.worker != worker:
        return None
    return Doing(
        worker=worker,
        host=host,
        pid=image.pid,
        limit_s=image.limit_s,
        state=process_state(image.pid),
        step=image.step,
        steps_s=image.steps_s,
        phase=image.phase,
        phase_s=image.phase_s,
        line=image.line,
        work=image.work,
        run_delay_s=run_delay_s(image.pid),
        idle_s=image.idle_s,
        waits_for=image.waits_for,
        waited_s=image.waited_s,
        groups=image.groups,
        calls=image.calls,
    )


def run_delay_s(pid: int) -> float | None:
    """How long a process's first thread could run and was not let, since it began; None where nobody knows."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def process_state(pid: int) -> str:
    """Whether a process of this host is "running", "stopped" (SIGSTOP, a debugger) or "gone"."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone" if Path("/proc/self/stat").exists() else "running"
    return STATES.get(text.rpartition(")")[2].split()[0], "running")
