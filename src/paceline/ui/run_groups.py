"""The pools and sweeps below a folder of runs, and which runs belong to which of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.ui.pool_folder import POOL_FILE, PoolFolder
from paceline.ui.pool_history import Decision
from paceline.ui.run_place import GroupEntry
from paceline.ui.run_summary import RunSummary
from paceline.ui.sweep_folder import SWEEP_FILE, SweepFolder

__all__ = ["GROUP_FILES", "RunGroups"]

GROUP_FILES = {"pool": POOL_FILE, "sweep": SWEEP_FILE}  # what makes a folder one of them
MOST_GROUPS = 500


class RunGroups:
    """Call its methods from one thread at a time. `revision` counts looks that found something new."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolFolder] = {}
        self.sweeps: dict[str, SweepFolder] = {}
        self.revision = 1
        self._members: tuple[int, dict[str, GroupEntry]] = (0, {})  # and the revision that they are of

    def found(self, folders: Mapping[str, Mapping[str, Path]]) -> None:
        """Take which ones there are: by kind, their names and folders."""
        before = self.pools.keys() | self.sweeps.keys()
        self.pools = {
            name: self.pools.get(name) or PoolFolder(path, name)
            for name, path in list(folders.get("pool", {}).items())[:MOST_GROUPS]
        }
        self.sweeps = {
            name: self.sweeps.get(name) or SweepFolder(path, name)
            for name, path in list(folders.get("sweep", {}).items())[:MOST_GROUPS]
        }
        self.revision += before != self.pools.keys() | self.sweeps.keys()

    def look(self) -> None:
        """Read what has changed."""
        is_new = False
        for group in (*self.pools.values(), *self.sweeps.values()):
            is_new |= group.look()
        self.revision += is_new

    def summaries(self) -> dict[str, Any]:
        """Return what the overview shows of them."""
        return {
            "pools": [pool.summary() for _, pool in sorted(self.pools.items())],
            "sweeps": [sweep.summary() for _, sweep in sorted(self.sweeps.items())],
        }

    def runs_elsewhere(self, root: Path) -> Iterator[tuple[str, Path]]:
        """Yield name and directory of pools' runs that lie outside of the folder `root` (resolved). Only files of this
        user may name such a directory."""
        for pool in self.pools.values():
            prefix = "" if pool.path.resolve() == root else f"{pool.name}/"
            for run in pool.queued.values():
                path = Path(run.run_dir)
                if run.is_own and not path.is_relative_to(root):
                    yield prefix + run.name, path

    def members(self) -> Mapping[str, GroupEntry]:
        """Return what is known of the runs of all pools and sweeps, by their directories without links."""
        if self._members[0] != self.revision:
            found: dict[str, GroupEntry] = {}
            for pool in self.pools.values():
                for path, (phase, since) in pool.phases().items():
                    found[path] = GroupEntry(pool=pool.name, phase=phase, since=since)
            for sweep in self.sweeps.values():
                own, states = os.path.realpath(sweep.path), sweep.states()
                for key, name in sweep.run_dirs().items():
                    path = os.path.normpath(os.path.join(own, name))
                    known = found.get(path, GroupEntry())
                    found[path] = dataclasses.replace(known, sweep=sweep.name, number=key, trial_state=states[key])
            self._members = (self.revision, found)
        return self._members[1]

    def of_run(self, run_dir: Path) -> list[dict[str, Any]]:
        """Return the pools and sweeps that a run belongs to: `kind`, `name`, and of a sweep the trial's `number`."""
        real = Path(os.path.realpath(run_dir))
        pools = [
            {"kind": "pool", "name": pool.name} for pool in self.pools.values() if str(real) in pool.run_dirs().values()
        ]
        sweeps = [
            {"kind": "sweep", "name": sweep.name, "number": number}
            for sweep in self.sweeps.values()
            if (number := sweep.number_of(real)) is not None
        ]
        return pools + sweeps

    def decisions_on(self, run_dir: Path) -> list[Decision]:
        """Return what pools have decided on a run, by time."""
        real = os.path.realpath(run_dir)
        found = [one for pool in self.pools.values() for one in pool.decisions_on(real)]
        return sorted(found, key=lambda one: one.time)

    def pool_facts(self, name: str, known: Mapping[str, RunSummary]) -> dict[str, Any] | None:
        """Return what a pool's page shows; None where there is no such pool. `known`: runs by their real paths."""
        pool = self.pools.get(name)
        if pool is None:
            return None
        runs = {own: known.get(path) for own, path in pool.run_dirs().items()}
        return pool.facts({own: run for own, run in runs.items() if run is not None})

    def sweep_changes(self, name: str, since: int, known: Mapping[str, RunSummary]) -> dict[str, Any] | None:
        """Return what a sweep's page lacks that has seen revision `since`; None: nothing. `known` as above."""
        sweep = self.sweeps[name]
        own = os.path.realpath(sweep.path)
        found = {key: known.get(os.path.normpath(os.path.join(own, path))) for key, path in sweep.run_dirs().items()}
        pools = {os.path.realpath(pool.path): pool.name for pool in self.pools.values()}
        sweep.has_pages(
            {key: run.name for key, run in found.items() if run is not None},
            pool=pools.get(os.path.realpath(sweep.pool_dir)) if sweep.pool_dir else None,
        )
        return sweep.changes(since)
