"""A pool in the process of a test, whose runs write what real ones would: nothing is trained, and no time passes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.events import Evaluated, EventLog
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.pool_state import PoolRecord, RunEntry
from paceline.processes import process_started_s, this_host

__all__ = ["STUDY", "SimulatedPool", "write_study"]

STUDY = """
script = "train.py"
arguments = "--x {x}"
trials = 4
at_once = 2
pool = "pool"
storage = "journal:trials.log"

[objective]
metric = "eval/score"
direction = "maximize"

[sampler]
kind = "random"
seed = 3

[parameters]
x = { kind = "float", low = 0.0, high = 1.0 }
"""


def write_study(place: Path, text: str = STUDY, **lines: Any) -> Path:
    """Write a script and a study file; `lines` replace some of the first lines, or are new ones."""
    (place / "train.py").write_text('import paceline\npaceline.run(print, plan="replicas=1-2")\n')
    for name, value in lines.items():
        line = f"{name} = {json.dumps(value)}"
        text, found = re.subn(rf"(?m)^{name} = .*$", lambda _, line=line: line, text, count=1)
        text = text if found else f"{line}\n{text}"
    (place / "study.toml").write_text(text)
    return place / "study.toml"


class SimulatedPool:
    """Each `pass_time` all runs get one evaluation further: `score(x, n)` is the n-th of a run with `--x`."""

    def __init__(
        self, folder: Path, *, evaluations: int = 3, score: Callable[[float, int], float] = lambda x, n: x * n
    ) -> None:
        self.folder, self._evaluations, self._score = folder, evaluations, score
        folder.mkdir(parents=True, exist_ok=True)
        self.starts: Counter[str] = Counter()  # by run
        self.measure = "score"
        self.fails: set[str] = set()  # runs that end with an error
        self.serve()

    def serve(self, *, slots: int = 2) -> None:
        """Say that this process is the pool, with so many devices."""
        record = PoolRecord.load(self.folder)
        record.host, record.pid, record.slots = this_host(), os.getpid(), slots
        record.pid_started_s = process_started_s(os.getpid()) or 0.0
        record.save(self.folder)

    def end(self) -> None:
        """Say that no process is."""
        record = PoolRecord.load(self.folder)
        record.pid = 0
        record.save(self.folder)

    def pass_time(self) -> None:
        record = PoolRecord.load(self.folder)
        queued = queued_runs(self.folder, known={})
        for name in record.runs.keys() - queued.keys():
            del record.runs[name]
        for name, run in queued.items():
            entry = record.runs.setdefault(name, RunEntry())
            if not entry.is_over and run.least <= record.slots:
                self._go_on(run, entry)
        record.save(self.folder)

    def _go_on(self, run: PoolRun, entry: RunEntry) -> None:
        run_dir = Path(run.run_dir)
        events = run_dir / "attempt_1" / "worker_0" / "events.jsonl"
        if entry.phase == "waiting":
            self.starts[run.name] += 1
            entry.phase, entry.replicas = "running", run.least
            events.parent.mkdir(parents=True, exist_ok=True)
            record: dict[str, Any] = {"state": "stopped", "attempts": [{"attempt": 1, "started": clock.now()}]}
            (run_dir / "run.json").write_text(json.dumps(record))
            return
        if run.name in self.fails:
            entry.phase, entry.exit_code = "failed", 1
            console = self.folder / "consoles" / f"{run.name}.log"
            console.parent.mkdir(exist_ok=True)
            console.write_text("step 1\nRuntimeError: its data is broken\n\n")
            return
        done = entry.step // 10 + 1
        x = float(run.command[run.command.index("--x") + 1])
        with (run_dir / "metrics.jsonl").open("a") as file:
            for step in range(entry.step + 1, entry.step + 11):
                file.write(json.dumps({"step": step, "time": clock.now(), "loss": 1.0 - x}) + "\n")
        log = EventLog(events, worker=0)
        value = self._score(x, done)
        log.emit(Evaluated(step=10 * done, num_samples=1, metrics={self.measure: value}, duration_s=0.0))
        log.close()
        entry.step = 10 * done
        if done == self._evaluations:
            entry.phase, entry.replicas = "finished", 0
