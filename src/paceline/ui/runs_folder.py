"""The runs below a folder, each with its summary, and its pools and sweeps; kept up to date by looking at the files'
sizes and times.

A look at 1,000 runs is some thousand `stat` calls, and only runs whose files have changed are read again. Where many
are new, the newest are read first, and the rest in the next looks: a page is shown at once, and fills up.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.ui.pool_history import Decision
from paceline.ui.run_groups import GROUP_FILES, RunGroups
from paceline.ui.run_place import NOWHERE, RunPlace, place_of
from paceline.ui.run_summary import FileStamp, RunSummary, summary_of

__all__ = ["RunsFolder"]

SCAN_EVERY_S = 2.0  # for runs that have come or gone
SCAN_SELDOM_S = 20.0  # where only one run is shown
CHECK_EVERY_S = 2.0  # whether a running run's process is there
BUDGET_S = 0.3  # of one look, for reading
DEEPEST = 4  # folders within each other
MOST_RUNS = 10_000
MOST_FOLDERS = 20_000  # that are looked into
MOST_GONE = 1_000  # removed runs that are remembered
RECORD, METRICS = "run.json", "metrics.jsonl"


class RunsFolder:
    """All runs below `root`, which may be a run itself. Call it from one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.revision = 1
        self._runs: dict[str, _KnownRun] = {}
        self._groups = RunGroups()
        self._groups_seen, self._groups_revision = 0, 1
        self._groups_looked_s = -SCAN_EVERY_S
        self._gone: dict[str, int] = {}  # a run that was removed: in which revision
        self._forgot = 0  # the revision up to which removed runs were forgotten
        self._scanned_s = -SCAN_EVERY_S
        self.is_cut = False  # there are more runs than `MOST_RUNS`

    def find(self, name: str) -> Path | None:
        """Return the directory of a run that was found below the folder; None for every other name."""
        if name not in self._runs or not os.path.exists(self._runs[name].record):
            self._scan()
        return self._runs[name].path if name in self._runs else None

    def groups_of(self, run_dir: Path) -> list[dict[str, Any]]:
        """Return the pools and sweeps that a run belongs to, by what was read in the last seconds."""
        now = time.monotonic()
        if now - self._scanned_s >= SCAN_SELDOM_S:
            self._scan()
        if now - self._groups_looked_s >= SCAN_EVERY_S:
            self._look_at_groups()
        return self._groups.of_run(run_dir)

    def place_of(self, run_dir: Path, run: RunSummary | None) -> RunPlace:
        """Return where a run stands in its pool and its sweep, by what was read in the last seconds."""
        return NOWHERE if run is None else place_of(run, self._groups.members().get(os.path.realpath(run_dir)))

    def decisions_on(self, run_dir: Path) -> list[Decision]:
        """Return what pools have decided on a run, by what was read in the last seconds."""
        return self._groups.decisions_on(run_dir)

    def pool(self, name: str) -> dict[str, Any] | None:
        """Return what a pool's page shows; None where there is no such pool."""
        return self._groups.pool_facts(name, self._by_path())

    def pool_dir(self, name: str) -> Path | None:
        """Return a pool's folder; None where there is no such pool."""
        return self._groups.pools[name].path if name in self._groups.pools else None

    def sweep(self, name: str, since: int) -> dict[str, Any] | None:
        """Return what a page of a sweep lacks that has seen revision `since`; None: nothing, or no such sweep."""
        if name not in self._groups.sweeps:
            return None
        return self._groups.sweep_changes(name, since, self._by_path())

    def has_sweep(self, name: str) -> bool:
        return name in self._groups.sweeps

    def look(self, budget_s: float = BUDGET_S) -> None:
        """Find runs, and read those that have changed, for about `budget_s`; and the pools and sweeps."""
        now = time.monotonic()
        is_scan = now - self._scanned_s >= SCAN_EVERY_S
        if is_scan:
            self._scan()
        self._look_at_groups()
        self._read_runs(now, budget_s, also_ended=is_scan)
        self._place_runs()

    def _read_runs(self, now: float, budget_s: float, *, also_ended: bool) -> None:
        deadline = time.perf_counter() + budget_s
        due = [run for run in self._runs.values() if run.is_due(now, also_ended=also_ended)]
        for run in sorted(due, key=lambda one: one.changed_ns, reverse=True):
            if run.summary is None and time.perf_counter() > deadline:
                return
            summary = run.read(now)
            if summary is not None:
                self.revision += 1
                run.revision = self.revision

    def _place_runs(self) -> None:
        members = self._groups.members()
        for run in self._runs.values():
            place = NOWHERE if run.summary is None else place_of(run.summary, members.get(run.real))
            if place != run.place:
                run.place = place
                self.revision += 1
                run.revision = self.revision

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return what a page that has seen revision `since` lacks; None: nothing. `whole`: these are all runs."""
        whole = since <= self._forgot or since > self.revision
        if not whole and since == self.revision:
            return None
        known = [run for run in self._runs.values() if run.summary is not None]
        new = [
            run.summary.facts() | {"place": run.place.facts()}
            for run in known
            if run.summary is not None and (whole or run.revision > since)
        ]
        return {
            "revision": self.revision,
            "whole": whole,
            "runs": new,
            "gone": [] if whole else [name for name, revision in self._gone.items() if revision > since],
            "num_waiting": len(self._runs) - len(known),
            "is_cut": self.is_cut,
        } | (self._groups.summaries() if whole or self._groups_revision > since else {})

    def _by_path(self) -> dict[str, RunSummary]:
        """The runs that were read, by their directories without links."""
        return {run.real: run.summary for run in self._runs.values() if run.summary is not None}

    def _look_at_groups(self) -> None:
        self._groups_looked_s = time.monotonic()
        self._groups.look()
        if self._groups.revision != self._groups_seen:
            self._groups_seen = self._groups.revision
            self.revision += 1
            self._groups_revision = self.revision

    def _scan(self) -> None:
        self._scanned_s = time.monotonic()
        folders: dict[str, dict[str, Path]] = {kind: {} for kind in GROUP_FILES}
        found = dict(self._found(folders))
        self._groups.found(folders)
        for name, path in self._groups.runs_elsewhere(self.root.resolve()):
            if len(found) < MOST_RUNS and (path / RECORD).is_file():
                found.setdefault(name, path)
        for name in self._runs.keys() - found.keys():
            del self._runs[name]
            self.revision += 1
            self._gone[name] = self.revision
        if len(self._gone) > MOST_GONE:
            self._gone.clear()
            self._forgot = self.revision
        for name in found.keys() - self._runs.keys():
            self._runs[name] = _KnownRun(name, found[name], real=os.path.realpath(found[name]))
            self._gone.pop(name, None)
            self.revision += 1

    def _found(self, folders: dict[str, dict[str, Path]]) -> Iterator[tuple[str, Path]]:
        """Name and directory of each run. A run's own folders are not looked into. Pools and sweeps are put into
        `folders`."""
        self.is_cut = False
        if (self.root / RECORD).is_file():
            yield self.root.resolve().name or "run", self.root
            return
        waiting, num_runs, num_folders = [(self.root, "", 0)], 0, 0
        while waiting:
            folder, prefix, depth = waiting.pop()
            num_folders += 1
            for kind, file in GROUP_FILES.items():
                if (folder / file).is_file():
                    folders[kind][prefix.rstrip("/") or self.root.resolve().name or kind] = folder
            for entry in _folders_in(folder):
                name, path = f"{prefix}{_as_text(entry)}", folder / entry
                if (path / RECORD).is_file():
                    num_runs += 1
                    if num_runs > MOST_RUNS:
                        self.is_cut = True
                        return
                    yield name, path
                elif depth + 1 < DEEPEST and num_folders + len(waiting) < MOST_FOLDERS:
                    waiting.append((path, f"{name}/", depth + 1))


@dataclasses.dataclass(slots=True)
class _KnownRun:
    """A run, and what its files were like when it was read last."""

    name: str
    path: Path
    record: Path = dataclasses.field(init=False)
    metrics: Path = dataclasses.field(init=False)
    summary: RunSummary | None = None
    revision: int = 0
    real: str = ""  # its path without links
    place: RunPlace = NOWHERE
    _stamps: tuple[FileStamp, FileStamp] | None = None
    _checked_s: float = 0.0

    def __post_init__(self) -> None:
        self.record, self.metrics = self.path / RECORD, self.path / METRICS

    @property
    def changed_ns(self) -> int:
        return max(stamp.mtime_ns for stamp in self._stamps) if self._stamps else FileStamp.of(self.path).mtime_ns

    def is_due(self, now: float, *, also_ended: bool) -> bool:
        """Whether its files have changed; of a running run also after a while, since its process may have ended. Runs
        that have ended are looked at only where `also_ended`."""
        if self.summary is None:
            return True
        if not (self.summary.is_running or also_ended):
            return False
        is_here = self.summary.is_running and self.summary.is_checked
        is_old = is_here and now - self._checked_s >= CHECK_EVERY_S
        return is_old or self._stamps != self._stamps_now()

    def read(self, now: float) -> RunSummary | None:
        """Read it; returns its summary if that is another one than before."""
        self._checked_s, self._stamps = now, self._stamps_now()
        summary = summary_of(self.path, self.name)
        if summary == self.summary:
            return None
        self.summary = summary
        return summary

    def _stamps_now(self) -> tuple[FileStamp, FileStamp]:
        return FileStamp.of(self.record), FileStamp.of(self.metrics)


def _as_text(name: str) -> str:
    """A file's name with bytes that are no UTF-8 spelled out: no address can have them."""
    return name.encode("utf-8", errors="backslashreplace").decode()


def _folders_in(folder: Path) -> list[str]:
    """Names of the folders in a folder, in order; hidden ones left out, and none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(one.name for one in entries if not one.name.startswith(".") and one.is_dir())
    except OSError:  # not there (yet), or another user's
        return []
