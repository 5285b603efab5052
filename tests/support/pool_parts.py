"""Pretended nodes and a pretended clock, for tests of how runs come to the replicas that they should have."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline import run_lock
from paceline.pool import part_control
from paceline.pool.node_files import NodeRecord, PartRecord, WantedPart
from paceline.pool.nodes import NodeView
from paceline.pool.part_control import (
    PartControl,
)
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.pool.run_control import Observed

__all__ = ["RUN", "FakeNodes", "Scene"]

RUN = PoolRun(
    name="run",
    command=("train.py",),
    folder="/",
    environment={},
    run_dir="/nowhere",
    script="train.py",
    least=1,
    most=4,
    workers_each=1,
    submitted=1.0,
)


class FakeNodes:
    """Nodes whose agents do at once what is wanted, or not before `act()`: where `is_slow`."""

    def __init__(self, **gpus: tuple[str, ...] | None) -> None:
        self.views = {
            name: NodeView(NodeRecord(name=name, host=name, slots=len(own or "12"), gpus=own))
            for name, own in gpus.items()
        }
        self.wanted: Mapping[str, Mapping[str, WantedPart]] = {}
        self.is_slow = False
        self.starts: list[tuple[str, str]] = []

    @property
    def here(self) -> dict[str, NodeRecord]:
        return {name: view.record for name, view in self.views.items() if view.is_here}

    def get(self, name: str) -> NodeView | None:
        return self.views.get(name)

    def is_here(self, name: str) -> bool:
        return name in self.here

    def want(self, wanted: Mapping[str, Mapping[str, WantedPart]]) -> None:
        self.wanted = wanted
        if not self.is_slow:
            self.act()

    def act(self) -> None:
        """Start what is wanted and is not there, where no former part of the run goes on; forget what has ended."""
        for node, view in self.views.items():
            parts, has = self.wanted.get(node, {}), view.record.parts
            for run in [run for run in has if run not in parts and has[run].has_ended]:
                del has[run]
            for run, part in parts.items():
                if run not in has or (has[run].start != part.start and has[run].has_ended):
                    has[run] = PartRecord(start=part.start, pid=0 if part.leaves else 1, has_ended=part.leaves)
                    self.starts += [] if part.leaves else [(node, run)]

    def ends(self, node: str, run: str, code: int) -> None:
        part = self.views[node].record.parts[run]
        part.has_ended, part.exit_code = True, code

    def silence(self, node: str) -> None:
        self.views[node].silent_s = 1e9


class Scene:
    """A pool's parts, and what its user sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: FakeNodes, **runs: PoolRun) -> None:
        self.now, self.nodes, self.said, self.locked = time.monotonic(), nodes, list[str](), set[Path]()
        monkeypatch.setattr(part_control.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(run_lock, "is_held", lambda path: path in self.locked)
        self.runs = {
            name: dataclasses.replace(run, name=name, run_dir=f"/nowhere/{name}") for name, run in runs.items()
        }
        self.record = PoolRecord(runs={name: RunEntry() for name in runs})
        self.seen: dict[str, Observed] = {}
        self.num_changes = 0
        self.parts = self._new_parts()

    def _new_parts(self) -> PartControl:
        more: dict[str, Any] = {"seen": self.seen, "say_once": self.said.append, "changed": self._changed}
        record = self.record
        return PartControl(self.nodes, entries=record.runs, taken_out=record.taken_out, **more)  # type: ignore[arg-type]  # pretended nodes

    def _changed(self) -> None:
        self.num_changes += 1

    def restart(self, folder: Path) -> None:
        """The pool is killed, and another one goes on with what is on disk."""
        self.record.save(folder)
        self.record = PoolRecord.load(folder)
        self.seen = {}
        self.parts = self._new_parts()

    @property
    def entries(self) -> dict[str, RunEntry]:
        return self.record.runs

    def take_out(self, name: str) -> None:
        """What the pool does when a run has left the queue."""
        self.runs.pop(name)
        self.seen.pop(name, None)
        self.parts.part_with(name, self.entries.pop(name))

    def to(self, **target: Mapping[str, int]) -> None:
        self.parts.bring_about(self.runs, target)

    def at_work(self, run: str, **workers: int) -> None:
        self.seen[run] = Observed(
            state="running",
            has_stepped=True,
            replicas=sum(workers.values()),
            workers_on=dict(workers),
            at_work_on=dict(workers),
        )

    def look(self, run: str = "run") -> Any:
        return self.parts.look_at(run, self.entries[run])

    def shares(self, run: str = "run") -> dict[str, int]:
        return self.entries[run].shares

    def gpus(self, run: str) -> dict[str, Any]:
        return {node: part.gpus for node, part in self.entries[run].parts.items()}
