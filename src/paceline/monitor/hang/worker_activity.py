"""What the workers of this host are doing, read from outside: their flight recorders, and the system's view of them.

A worker's `WorkerActivity` is plain data, which other hosts send to the coordinator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.comm.flight_recorder import FILE_NAME, RecordedCollective, RecordedGroup, WorkTotals, read_flight_record
from paceline.processes import process_state, run_delay_s

__all__ = ["RecordedCollective", "RecordedGroup", "WorkTotals", "WorkerActivity", "read_activity"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerActivity:
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
    work: WorkTotals
    run_delay_s: float | None  # see `run_delay_s`
    idle_s: float  # since anything changed in its flight record
    waits_for: int  # serial of a call; 0: for nothing
    waited_s: float
    groups: tuple[RecordedGroup, ...]  # the run's own first
    calls: tuple[RecordedCollective, ...]  # the newest ones, oldest first

    def entered(self, group: int) -> int:
        """Return how many collectives it has entered in a group; 0 if it is no member."""
        return next((entry.entered for entry in self.groups if entry.id == group), 0)

    def call(self, group: int, sequence: int) -> RecordedCollective | None:
        """The call with this number in a group; None where it was long ago, or has not come."""
        return next((call for call in self.calls if call.group == group and call.sequence == sequence), None)

    @property
    def waiting(self) -> RecordedCollective | None:
        """The call that it waits for."""
        return next((call for call in self.calls if call.serial == self.waits_for), None) if self.waits_for else None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerActivity:
        """Read what `to_json` returned; raise TypeError or KeyError if it is something else."""
        fields = dict(data)
        fields["steps_s"] = tuple(fields["steps_s"])
        fields["groups"] = tuple(
            RecordedGroup(id=one["id"], name=one["name"], members=tuple(one["members"]), entered=one["entered"])
            for one in data["groups"]
        )
        fields["work"] = WorkTotals(**fields["work"])
        fields["calls"] = tuple(RecordedCollective(**one) for one in data["calls"])
        return cls(**fields)


def read_activity(worker_dir: Path, worker: int, *, host: str, with_calls: bool = True) -> WorkerActivity | None:
    """Return what a worker of this host does; None where it has not begun to say so."""
    image = read_flight_record(worker_dir / FILE_NAME, with_calls=with_calls)
    if image is None or image.worker != worker:
        return None
    return WorkerActivity(
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
