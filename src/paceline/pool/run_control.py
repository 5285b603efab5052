"""Starts and stops the runs of a pool, and reads how they do, through what every run has: its command and its
directory. Runs are processes of their own, and go on if the pool's process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.coordinator.control_socket import ask_to_end
from paceline.logs.log_reader import last_lines
from paceline.logs.metric_rows import read_row
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.monitor.status.status import status
from paceline.pool.pool_run import PoolRun
from paceline.private_files import make_run_directory
from paceline.processes import is_same_process
from paceline.runs.go_on import words_to_go_on

__all__ = ["NewestSteps", "Observed", "ask_to_stop", "console_of", "measured_step", "observe", "start"]

CONSOLES = "consoles"
ROWS, LEAST_ROWS = 40, 3  # newest steps of which the median is taken
SETTLING_STEPS = 2  # after a change of replicas: steps that are not like the others
PRESENT = ("starting", "running", "halted")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NewestSteps:
    """Median seconds of the newest steps; `samples_s` of them for their micro-batches, which grow with the batch."""

    total_s: float
    samples_s: float

    def on_least(self, *, scale: float, replicas: int) -> tuple[float, float]:
        """The seconds of a step, and the worker-seconds of its micro-batches, with a batch that is 1 / `scale` times
        as large.
        """
        each_s = self.samples_s / scale
        return self.total_s - (scale - 1) * each_s, each_s * replicas


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """A run as its directory shows it. `state`: "" where it has never been started, else that of its record, or "lost".
    `replicas` are those whose workers are there.
    """

    state: str = ""
    exit_code: int | None = None
    replicas: int = 0
    workers_on: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])  # present, by host
    at_work_on: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])  # that have taken a step
    step: int = 0
    last_step: int | None = None
    has_stepped: bool = False  # since it was started: before, it cannot be resized
    noise_scale: float | None = None

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING


def observe(run: PoolRun) -> Observed:
    """Read how a run does."""
    try:
        now = status(run.run_dir)
    except ValueError:
        return Observed()
    workers = [worker for worker in now.workers if worker.state in PRESENT] if now.state == RUNNING else []
    noise = next((row.get("noise_scale") for row in _last_rows(run, 1)), None)
    return Observed(
        state=now.state,
        exit_code=now.exit_code,
        replicas=-(-len(workers) // run.workers_each),
        workers_on=Counter(worker.host for worker in workers if worker.host),
        at_work_on=Counter(worker.host for worker in workers if worker.idle is not None),
        step=now.progress.step,
        last_step=now.progress.last_step,
        has_stepped=now.progress.since_step_s is not None,
        noise_scale=noise,
    )


def measured_step(run: PoolRun, *, after_step: int) -> NewestSteps | None:
    """The medians of the newest steps after `after_step`, from which on the run's replicas were those that it has; None
    where there are too few of them.
    """
    totals, samples = list[float](), list[float]()
    for row in _last_rows(run, ROWS):
        seconds = row.get("seconds", {})
        total = seconds.get("total")
        if total is None or row.get("step", 0) <= after_step + SETTLING_STEPS:
            break
        totals.append(total)
        samples.append(seconds.get("data", 0.0) + seconds.get("compute", 0.0))
    if len(totals) < LEAST_ROWS:
        return None
    return NewestSteps(total_s=statistics.median(totals), samples_s=statistics.median(samples))


def _last_rows(run: PoolRun, count: int) -> Iterator[dict[str, Any]]:
    """The newest first; lines that cannot be read are passed over."""
    for line in itertools.islice(last_lines(Path(run.run_dir) / "metrics.jsonl"), count):
        with contextlib.suppress(ValueError):
            row = read_row(line)
            if row is not None:
                yield row


def console_of(pool: Path, run: PoolRun) -> Path:
    """Where what the run's command prints is written."""
    return pool / CONSOLES / f"{run.name}.log"


def start(
    pool: Path,
    run: PoolRun,
    *,
    replicas: int,
    threads: int,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run, or go on with it from its newest checkpoint; raises OSError where its folder is gone. It is no child
    of the terminal: only `ask_to_stop` and its own end end it. It gets `more` options, and `variables` in its
    environment.
    """
    console = console_of(pool, run)
    make_run_directory(console.parent)
    words = ["run", *_sizes(run, replicas, threads), *more, *run.command]
    if (Path(run.run_dir) / "run.json").exists():
        words = words_to_go_on(words, Path(run.run_dir), script=Path(run.folder, run.script), names_dir=False)
    else:
        words[1:1] = ["--run-dir", run.run_dir]
    with console.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            cwd=run.folder,
            env={**run.environment, "PYTHONUNBUFFERED": "1", **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _sizes(run: PoolRun, replicas: int, threads: int) -> list[str]:
    own = any(word.partition("=")[0] == "--threads" for word in run.command)
    return ["--workers", str(replicas * run.workers_each), *([] if own else ["--threads", str(threads)])]


def ask_to_stop(run: PoolRun) -> str:
    """Have a run finish the step in hand, save and end on all of its hosts; does not wait for it.

    Returns the host on which it has to be asked, where its supervisor is on another one; else "".
    """
    try:
        record = RunRecord.load(run.run_dir)
    except ValueError:
        return ""
    if record.state != RUNNING:
        return ""
    if not record.is_here():
        return record.host
    if not is_same_process(record.pid, record.pid_started_s):
        return ""
    if record.job.get("head") is None or not ask_to_end(record.pid):  # SIGTERM may be for one of several hosts alone
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    return ""
