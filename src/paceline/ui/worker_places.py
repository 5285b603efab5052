"""Where each worker of a run is now: what `paceline status` says, and the phase, line and collective that its flight
recorder has, which is read from outside and costs the worker nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from paceline.monitor.records.event_reader import attempt_dir
from paceline.monitor.status.status import RunStatus, WorkerStatus
from paceline.processes import this_host
from paceline.units import printable

__all__ = ["worker_places"]

MOST_SHOWN = 256  # workers of a run
AT_WORK = ("running", "halted", "starting")


def worker_places(now: RunStatus) -> list[dict[str, Any]]:
    """Return a row for each of the first `MOST_SHOWN` workers: the fields of `WorkerStatus`, and of those at work on
    this host `phase`, `phase_s`, `line`, `waits_for` (a collective; "" for none) and `waited_s`."""
    directory = attempt_dir(Path(now.run_dir), now.attempt)
    return [_place(worker, directory) for worker in now.workers[:MOST_SHOWN]]


def _place(worker: WorkerStatus, directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = dataclasses.asdict(worker) | {
        "host": printable(worker.host),
        "device": printable(worker.device),
        "place": printable(worker.place),
    }
    if worker.state not in AT_WORK or worker.host != this_host():
        return row
    activity = read_activity(directory / f"worker_{worker.rank}", worker.rank, host=worker.host)
    if activity is None or activity.pid != worker.pid:
        return row
    return row | {
        "step": max(worker.step, activity.step),
        "phase": printable(activity.phase),
        "phase_s": round(activity.phase_s, 3),
        "line": printable(activity.line),
        "waits_for": _collective_text(activity),
        "waited_s": round(activity.waited_s, 3),
    }


def _collective_text(activity: WorkerActivity) -> str:
    """Return "all_reduce in replicas"; "" where it waits for nothing."""
    call = activity.waiting
    if call is None:
        return ""
    group = next((one.name for one in activity.groups if one.id == call.group), "")
    return printable(f"{call.kind} in {group}" if group else call.kind)
