"""A pool as its page shows it, read from the files in its folder: devices, queue, decisions.

Files are read again where their size or time has changed. They may be of another version, or damaged: what is missing
or of another type is left out, and nothing is taken for granted. Of a queued run's file, which has the environment of
its user, only the named values are kept.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import clock, run_lock
from paceline.plain_data import read_object
from paceline.processes import is_same_process, this_host
from paceline.regular_files import open_regular, read_regular
from paceline.ui.metrics_rows import number
from paceline.ui.pool_devices import devices_of
from paceline.ui.pool_history import Decision, decision_of, history_of
from paceline.ui.run_summary import FileStamp, RunSummary
from paceline.units import printable

__all__ = ["POOL_FILE", "PoolFolder", "QueuedRun"]

POOL_FILE, QUEUE, DECISIONS = "pool.json", "queue", "decisions.jsonl"
MOST_BYTES = 16 << 20  # of pool.json
MOST_QUEUED_BYTES = 4 << 20  # of a queued run
DECISIONS_BYTES = 1 << 18  # the newest of them
MOST_RUNS = 2000
MOST_DECISIONS = 200  # that are shown in words
MOST_TEXT = 600
SHORTLY_S = 5.0  # between two looks: when a run was taken out is known as exactly
MOST_DEVICES = 1_000_000
WAITING, RUNNING, LEAVING = "waiting", "running", "leaving"
ENDED = ("finished", "failed", "stopped")
PHASES = (WAITING, RUNNING, LEAVING, *ENDED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueuedRun:
    """A run as it was queued. `run_dir`: without links. `is_own`: its file belongs to this user, so that it may name a
    run directory anywhere."""

    name: str
    run_dir: str
    least: int
    most: int
    workers_each: int
    submitted: float
    priority: float
    deadline: float | None
    is_own: bool


class PoolFolder:
    """Call its methods from one thread at a time."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.queued: dict[str, QueuedRun] = {}
        self.problem = ""
        self._record: Mapping[str, Any] = {}
        self._decisions: list[Decision] = []
        self._stamps: dict[str, FileStamp] = {}
        self._files: dict[str, tuple[FileStamp, QueuedRun | None]] = {}
        self._known_state = ""
        # Of runs that are not there any more: when they were missed, where one looked shortly before, and the workers
        # of a replica.
        self._taken_out: dict[str, tuple[float | None, int]] = {}
        self._looked_s = -math.inf

    def look(self) -> bool:
        """Read what has changed; returns whether anything has, or its process has come or gone."""
        is_new = False
        for name, read in (
            (POOL_FILE, self._read_record),
            (QUEUE, self._read_queue),
            (DECISIONS, self._read_decisions),
        ):
            stamp = FileStamp.of(self.path / name)
            if stamp != self._stamps.get(name):
                self._stamps[name] = stamp
                read()
                is_new = True
        self._looked_s = time.monotonic()
        state, self._known_state = self._known_state, self._state()
        return is_new or state != self._known_state

    def run_dirs(self) -> dict[str, str]:
        """Return the runs' directories, without links, by their names in the pool."""
        return {one.name: one.run_dir for one in self.queued.values()}

    def phases(self) -> dict[str, tuple[str, float | None]]:
        """Return each run's phase and when it changed last, by the run's directory without links."""
        entries = {one.run_dir: self._entry(one.name) for one in self.queued.values()}
        return {path: (str(one.get("phase", WAITING)), _when(one.get("since"))) for path, one in entries.items()}

    def decisions_on(self, run_dir: str) -> list[Decision]:
        """Return what was decided on the run of this directory, without links, by time."""
        names = {one.name for one in self.queued.values() if one.run_dir == run_dir}
        return [one for one in self._decisions if one.run in names]

    def summary(self) -> dict[str, Any]:
        """Return a few values, for the overview."""
        phases = [self._entry(name).get("phase") for name in self.queued]
        held = {name: self._devices(name) for name in self.queued if self._devices(name)}
        return {
            "name": self.name,
            "state": self._state(),
            "slots": self._slots(),
            "held": sum(held.values()),
            "holders": [{"run": name, "devices": count} for name, count in held.items()][:64],
            "num_running": sum(phase in (RUNNING, LEAVING) for phase in phases),
            "num_waiting": sum(phase not in (RUNNING, LEAVING, *ENDED) for phase in phases),
            "num_ended": sum(phase in ENDED for phase in phases),
        }

    def facts(self, known: Mapping[str, RunSummary]) -> dict[str, Any]:
        """Return everything that the pool's page shows. `known`: summaries of its runs, by their names in the pool."""
        runs = [self._run_facts(one, known.get(one.name)) for one in self.queued.values()]
        names = {one.name: None if (run := known.get(one.name)) is None else run.name for one in self.queued.values()}
        decisions = [one.facts() | {"page": names.get(one.run)} for one in self._decisions[-MOST_DECISIONS:]]
        return {
            **self.summary(),
            "path": printable(str(self.path.resolve())),
            "host": printable(str(self._record.get("host", "")))[:MOST_TEXT],
            "pid": _whole(self._record.get("pid")),
            "problem": self.problem,
            "nodes": devices_of(self._record, {name: self._devices(name) for name in self.queued}),
            "runs": runs[:MOST_RUNS],
            "num_runs": len(runs),
            "decisions": decisions,
            "history": history_of(
                self._decisions,
                each={name: each for name, (_, each) in self._taken_out.items()}
                | {one.name: one.workers_each for one in self.queued.values()},
                ends={one["name"]: one["gave_back"] for one in runs},
                missed={name: when for name, (when, _) in self._taken_out.items() if when is not None},
                slots=sum(node["slots"] for node in devices_of(self._record, {})),
            ),
        }

    def _run_facts(self, run: QueuedRun, known: RunSummary | None) -> dict[str, Any]:
        entry = self._entry(run.name)
        phase = str(entry.get("phase", WAITING))
        step, last_step = _whole(entry.get("step")), _whole_or_none(entry.get("last_step"))
        ended = _when(entry.get("ended"))
        since = _when(entry.get("since")) or run.submitted
        return {
            "name": run.name,
            "page": known.name if known is not None else None,
            "phase": phase if phase in PHASES else printable(phase)[:40],
            "is_over": phase in ENDED,
            "replicas": _whole(entry.get("replicas")),
            "devices": self._devices(run.name),
            "least": run.least,
            "most": run.most,
            "workers_each": run.workers_each,
            "step": max(step, known.step) if known is not None else step,
            "last_step": last_step if last_step is not None else known.last_step if known is not None else None,
            "left_s": known.left_s if known is not None and phase == RUNNING else None,
            "loss": known.loss if known is not None else None,
            "priority": run.priority,
            "deadline": run.deadline,
            "submitted": run.submitted,
            "since": since,
            "ended": ended,
            "gave_back": ended if phase in ENDED else since if phase == WAITING else None,
            "attained": number(entry.get("attained")) or 0.0,
            "why": printable(str(entry.get("why", "")))[:MOST_TEXT],
            "exit_code": _whole_or_none(entry.get("exit_code")),
        }

    def _state(self) -> str:
        """`running`, or `stopped`: its process is not at work. That of another host is known by the folder's lock."""
        host = self._record.get("host")
        if host and host != this_host():
            return "stopped" if self._record.get("has_ended") is True or not run_lock.is_held(self.path) else "running"
        started = number(self._record.get("pid_started_s"))
        pid = _whole(self._record.get("pid"))
        return "running" if pid and started is not None and is_same_process(pid, started) else "stopped"

    def _slots(self) -> int:
        return sum(node["slots"] for node in devices_of(self._record, {}) if node["is_here"])

    def _entry(self, name: str) -> Mapping[str, Any]:
        runs = self._record.get("runs")
        entry = runs.get(name) if isinstance(runs, dict) else None
        return entry if isinstance(entry, dict) else {}

    def _devices(self, name: str) -> int:
        """Devices that a run has now."""
        entry, run = self._entry(name), self.queued.get(name)
        if entry.get("phase") not in (RUNNING, LEAVING):
            return 0
        each = run.workers_each if run is not None else 1
        return _whole(entry.get("devices")) or _whole(entry.get("replicas")) * each

    def _read_record(self) -> None:
        self.problem = ""
        try:
            self._record = read_object(read_regular(self.path / POOL_FILE, MOST_BYTES))
        except FileNotFoundError:
            self._record = {}
        except (OSError, ValueError) as error:
            self._record, self.problem = {}, f"{POOL_FILE} cannot be read: {printable(str(error))}"

    def _read_queue(self) -> None:
        """Read the files that are new; they are not changed once they are there."""
        found: dict[str, tuple[FileStamp, QueuedRun | None]] = {}
        for name in _names_in(self.path / QUEUE)[:MOST_RUNS]:
            path = self.path / QUEUE / name
            stamp = FileStamp.of(path)
            known = self._files.get(name)
            found[name] = known if known is not None and known[0] == stamp else (stamp, _queued(path))
        self._files = found
        runs = [run for _, run in found.values() if run is not None]
        before = self.queued
        self.queued = {run.name: run for run in sorted(runs, key=lambda run: (run.submitted, run.name))}
        missed = clock.now() if time.monotonic() - self._looked_s < SHORTLY_S else None
        for name in before.keys() - self.queued.keys():
            self._taken_out[name] = missed, before[name].workers_each
        for name in [*self.queued.keys() & self._taken_out.keys(), *list(self._taken_out)[:-MOST_RUNS]]:
            self._taken_out.pop(name, None)

    def _read_decisions(self) -> None:
        try:
            with open_regular(self.path / DECISIONS, buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                begin = max(0, size - DECISIONS_BYTES)
                lines = os.pread(file.fileno(), DECISIONS_BYTES, begin).split(b"\n")[:-1]
        except OSError:  # nothing was decided yet
            lines, begin = [], 0
        found = [decision_of(line) for line in lines[1 if begin else 0 :]]
        self._decisions = sorted((one for one in found if one is not None), key=lambda one: one.time)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith("."))
    except OSError:
        return []


def _queued(path: Path) -> QueuedRun | None:
    """The values that are shown of a queued run; None where the file is none."""
    try:
        is_own = os.stat(path, follow_symlinks=False).st_uid == os.getuid()
        fields = read_object(read_regular(path, MOST_QUEUED_BYTES))
    except (OSError, ValueError):
        return None
    run_dir, name = fields.get("run_dir"), fields.get("name")
    if not isinstance(run_dir, str) or not run_dir.startswith("/") or "\0" in run_dir:
        return None
    if not isinstance(name, str) or not name:
        return None
    return QueuedRun(
        name=printable(name)[:MOST_TEXT],
        run_dir=os.path.realpath(run_dir),
        least=_whole(fields.get("least")),
        most=_whole(fields.get("most")),
        workers_each=max(1, _whole(fields.get("workers_each"))),
        submitted=_when(fields.get("submitted")) or 0.0,
        priority=number(fields.get("priority")) or 1.0,
        deadline=_when(fields.get("deadline")),
        is_own=is_own,
    )


def _whole(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MOST_DEVICES * MOST_DEVICES else 0


def _whole_or_none(value: object) -> int | None:
    return value if type(value) is int and -MOST_DEVICES <= value <= MOST_DEVICES * MOST_DEVICES else None


def _when(value: object) -> float | None:
    found = number(value)
    return found if found is not None and 0 < found < 1e11 else None
