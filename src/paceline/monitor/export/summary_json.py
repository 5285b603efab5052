"""Adds up an attempt of a run and writes RUN/summary.json."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.errors import writing
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    MicroBatchHalved,
    Record,
    Regrouped,
    Restarted,
    RunStarted,
    ServerReplaced,
    SpikeSeen,
    StepsMerged,
    TaskLost,
    TaskStarted,
    UploadDone,
    UploadFailed,
    WireJudged,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from paceline.logs.metric_rows import StepRanges
from paceline.monitor.records.run_files import replace_text
from paceline.monitor.records.steps import Step, real, shares

__all__ = ["Summary"]

MOST_SPEEDS, MOST_EPOCHS = 100_000, 1000  # in memory, however long the run


class Summary:
    """Takes records and steps, and sums them up at any time."""

    def __init__(self, run_dir: Path, *, attempt: int, workers: int, max_steps: int | None = None) -> None:
        self.run_dir, self.attempt, self.workers = run_dir, attempt, workers
        self._max_steps = max_steps
        self.plan: str | None = None
        self.startup_s: float | None = None
        self.checkpoint: CheckpointSaved | None = None
        self.evaluated: Evaluated | None = None
        self.seconds: dict[str, float] = {}  # sums over steps
        self.first: Step | None = None
        self.last: Step | None = None
        self._newest = 0
        self.num_steps = self.num_samples = self.num_dropped = self.num_skipped = self.num_bytes_sent = 0
        self.num_wire_bytes = self.num_raw_bytes = 0
        self._batch_size = 0  # the largest of a step
        self._opened = clock.now()
        self._commanded: float | None = None  # when the user's command began, from the workers' start-up times
        self._started: RunStarted | None = None
        self._devices: dict[str, None] = {}
        self._ranks: set[int] = set()  # of workers that have started
        self._num_lost = self._num_joined = self._num_steps_lost = 0
        self._num_replaced = 0  # servers, by their mirrors
        self._tasks: dict[int, str] = {}  # names of another framework's tasks, by rank
        self._num_tasks_lost = 0  # that were started again alone
        self._judged: dict[str, Any] | None = None  # what holds of the wire
        self._begun_again: dict[str, Any] | None = None  # as this attempt: after whose loss, from where
        self._micro: int | None = None  # samples of a micro-batch, since a step ran out of memory
        self._left: list[dict[str, Any]] = []  # workers that left the run while it went on, by time
        self._num_undone = self._rolled_back_at = 0  # steps that rollbacks undid; the step of the last one
        self._resumed_from_step = 0
        self._num_checkpoints = self._num_failed_checkpoints = 0
        self._uploaded: UploadDone | None = None
        self._num_uploads = self._num_failed_uploads = 0
        self._peaks: dict[int, int] = {}
        self._state_bytes: dict[int, int] = {}
        self._epochs: set[int] = set()  # that are not in the next one
        self._past_epochs = StepRanges()
        self._speeds = array("d")  # samples per second, of each step, of every second, of every fourth, ...
        self._speed_every = 1
        self._num_speeds = 0
        self._losses: list[float | None] = [None, None]

    def accept(self, item: Record | Step) -> None:
        if isinstance(item, Step):
            self._step(item)
            return
        match item.event:
            case WorkerStarted() as started:
                self._worker_started(started, item.time)
            case StepsMerged() as steps:
                self._summed(steps)
            case Evaluated() as evaluated:
                self.evaluated = evaluated
            case CheckpointSaved() as saved:
                self.checkpoint = saved
                self._num_checkpoints += 1
            case CheckpointFailed():
                self._num_failed_checkpoints += 1
            case UploadDone() as uploaded:
                self._uploaded = uploaded
                self._num_uploads += 1
            case UploadFailed():
                self._num_failed_uploads += 1
            case WorkerFinished(rank=worker, peak_memory_bytes=peak, state_bytes=state):
                self.peak_memory(worker, peak)
                self._state_bytes[worker] = state
            case RunStarted() as started:
                self._started = started
            case TaskStarted(rank=worker, name=name):
                self._tasks[worker] = name
            case TaskLost():
                self._num_tasks_lost += 1
            case Restarted(lost=lost, at_step=at_step, step=step, source=source, micro=micro):
                self._begun_again = {"lost": list(lost), "at_step": at_step, "step": step, "source": source}
                self._micro = micro
            case MicroBatchHalved(after=after):
                self._micro = after
            case WorkerLost():
                self._num_lost += 1
            case Regrouped(steps_lost=steps_lost):
                self._num_steps_lost += steps_lost
            case WorkerJoined():
                self._num_joined += 1
            case ServerReplaced():
                self._num_replaced += 1
            case WorkerLeft(rank=worker, step=step, reason=reason):
                self._left.append({"worker": worker, "step": step, "reason": reason})
            case WireJudged(kind=kind) as judged:
                self._judged = None if kind == "none" else dataclasses.asdict(judged)
            case SpikeSeen(step=step, action="rollback", to_step=int(to_step)):
                # A second rollback to the same snapshot undoes only what came after the first one.
                self._num_undone += max(0, step - 1 - max(to_step, self._rolled_back_at))
                self._rolled_back_at = step
            case _:
                pass

    def close(self) -> None:
        """Nothing is held open: `write` writes."""

    def peak_memory(self, worker: int, num_bytes: int) -> None:
        """Note a worker's peak memory, reported by itself or by the process that saw it end."""
        self._peaks[worker] = max(num_bytes, self._peaks.get(worker, 0))

    @property
    def shares(self) -> dict[str, float]:
        """How the steps' time divides: data, compute, communication, optimizer, other."""
        return shares(self.seconds)

    @property
    def samples_per_s(self) -> float | None:
        """From the first commit to the last, everything between them included (evaluations and checkpoints too)."""
        if self.first is None or self.last is None or not self.num_samples:
            return None
        passed = self.last.time - self.first.time
        return (self.num_samples - self.first.num_samples) / passed if passed > 0 else self.first.samples_per_s

    @property
    def _saved_step(self) -> int:
        """With this step a next attempt begins, as far as this one knows."""
        return self.checkpoint.step if self.checkpoint else self._resumed_from_step

    def facts(self, state: str, exit_code: int) -> dict[str, Any]:
        """Return what `summary.json` holds, were the attempt to end now in this state."""
        first, last, now = self.first, self.last, clock.now()
        begun = self._commanded or self._opened
        most = max(self._peaks, key=self._peaks.__getitem__, default=0)  # the worker with most
        first_began = None if first is None else first.time - first.seconds.get("total", 0.0)
        return {
            "state": state,
            "exit_code": exit_code,
            "program": self._started.program if self._started else None,
            "plan": self.plan,
            "workers": self.workers,
            "hosts": self._started.hosts if self._started else None,
            "devices": list(self._devices),
            "attempt": self.attempt,
            "resumed_from_step": self._resumed_from_step,
            "step": self._newest if last else self._resumed_from_step,
            "steps": self.num_steps,
            "max_steps": self._max_steps,
            "skipped_steps": self.num_skipped,
            "undone_steps": self._num_undone,
            "samples": self.num_samples,
            "dropped_samples": self.num_dropped,
            "workers_lost": self._num_lost,
            "workers_joined": self._num_joined,
            "steps_lost": self._num_steps_lost,
            "begun_again": self._begun_again,
            "tasks": [self._tasks[worker] for worker in sorted(self._tasks)],
            "tasks_lost": self._num_tasks_lost,
            "servers_replaced": self._num_replaced,
            "micro_halved_to": self._micro,
            "left": self._left,
            "steps_unsaved": 0 if state == "finished" or last is None else max(0, self._newest - self._saved_step),
            "epochs": len(self._past_epochs) + len(self._epochs),
            "first_loss": real(self._losses[0]),
            "last_loss": real(self._losses[1]),
            "metrics": {name: real(value) for name, value in last.measured.items()} if last else {},
            "evaluation": {name: real(value) for name, value in self.evaluated.metrics.items()}
            if self.evaluated
            else None,
            "evaluation_step": self.evaluated.step if self.evaluated else None,
            "samples_per_s": _rounded(self.samples_per_s),
            "samples_per_s_median": _rounded(statistics.median(self._speeds)) if self._speeds else None,
            "share_communication": _rounded(self.shares.get("communication"), 4),
            "shares": {phase: _rounded(share, 4) for phase, share in self.shares.items()},
            "num_bytes_sent": self.num_bytes_sent,
            "num_wire_bytes": self.num_wire_bytes,
            "wire_ratio": _rounded(self.num_wire_bytes / self.num_raw_bytes, 4) if self.num_raw_bytes else None,
            "noise_scale": None if last is None else _rounded(real(last.noise_scale)),
            "batch_size": self._batch_size,
            "wire_judged": self._judged,
            "startup_s": _rounded(self.startup_s),
            "first_step_began_s": None if first_began is None else _rounded(first_began - begun),
            "first_commit_s": None if first is None else _rounded(first.time - begun),
            "started": round(begun, 3),
            "duration_s": _rounded(now - begun),
            "peak_memory_bytes": max(self._peaks.values(), default=None),
            "state_bytes": self._state_bytes.get(most, 0) or None,  # of the model and its optimizer, in that worker
            "states_bytes": sorted(filter(None, self._state_bytes.values())),  # of all workers that reported it
            "checkpoint": self.checkpoint.path if self.checkpoint else None,
            "checkpoint_step": self.checkpoint.step if self.checkpoint else None,
            "checkpoints_saved": self._num_checkpoints,
            "checkpoints_failed": self._num_failed_checkpoints,
            "uploaded_checkpoint": self._uploaded.path if self._uploaded else None,
            "uploads": self._num_uploads,
            "uploads_failed": self._num_failed_uploads,
            "run_dir": str(self.run_dir),
            "log_dir": str(self.run_dir / f"attempt_{self.attempt}"),
        }

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write `summary.json`; RunFileError where it cannot be written."""
        path = self.run_dir / "summary.json"
        with writing(path):
            replace_text(path, json.dumps(facts, indent=1, allow_nan=False) + "\n")

    def _worker_started(self, started: WorkerStarted, when: float) -> None:
        self._devices[started.device] = None
        if started.rank in self._ranks:
            return  # a successor: its start-up is part of an incident
        self._ranks.add(started.rank)
        self.plan = started.plan
        self.startup_s = max(started.startup_s, self.startup_s or 0.0)
        self._commanded = min(when - started.startup_s, self._commanded or math.inf)
        self._resumed_from_step = started.resumed_from_step

    def _step(self, row: Step) -> None:
        self.first, self.last = self.first or row, row
        self._newest = max(self._newest, row.step)  # replicas that take turns end them in any order
        self.num_steps += 1
        self.num_skipped += row.skipped
        self.num_samples += row.num_samples
        self.num_dropped += row.num_dropped
        self.num_bytes_sent += row.num_bytes_sent
        self.num_wire_bytes += row.num_wire_bytes
        self.num_raw_bytes += row.num_raw_bytes
        self._batch_size = max(self._batch_size, row.num_samples)
        self._epoch(row.epoch)
        if row.samples_per_s is not None:
            self._speed(row.samples_per_s)
        if row.loss is not None:
            self._losses = [row.loss if self._losses[0] is None else self._losses[0], row.loss]
        for phase, seconds in row.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def _summed(self, steps: StepsMerged) -> None:
        """Steps that were summed up before this process could read them."""
        self._newest = max(self._newest, steps.last_step)
        self.num_steps += steps.num_steps
        self.num_skipped += steps.num_skipped
        self.num_samples += steps.num_samples
        self.num_dropped += steps.num_dropped
        self._epoch(steps.epoch)

    def _epoch(self, epoch: int) -> None:
        if epoch in self._past_epochs:
            return
        self._epochs.add(epoch)
        if len(self._epochs) > MOST_EPOCHS:
            ranges = [*self._past_epochs.ranges(), *((each, each) for each in self._epochs)]
            self._past_epochs = StepRanges(ranges)
            self._epochs.clear()

    def _speed(self, samples_per_s: float) -> None:
        if self._num_speeds % self._speed_every == 0:
            self._speeds.append(samples_per_s)
        self._num_speeds += 1
        if len(self._speeds) > MOST_SPEEDS:
            self._speeds = self._speeds[::2]
            self._speed_every *= 2


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
