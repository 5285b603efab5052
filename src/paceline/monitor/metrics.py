"""Writes RUN/metrics.jsonl: one line for each committed step, over all attempts, no step twice.

A continued run takes its steps again from a checkpoint. The lines of the steps after that checkpoint are dropped
first, so that the file always tells one story from the first step to the last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import writing
from paceline.events import Record, WorkerStarted
from paceline.monitor.steps import Step, real

__all__ = ["MetricsFile", "metrics_line"]


class MetricsFile:
    """Appends steps to `metrics.jsonl`, a line each, readable at once; RunFileError where it cannot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def accept(self, item: Record | Step) -> None:
        with writing(self.path):
            if isinstance(item, Step):
                self._open(item.step - 1).write(json.dumps(metrics_line(item), allow_nan=False) + "\n")
            elif isinstance(item.event, WorkerStarted):
                self._open(item.event.resumed_from_step)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self.path):
                file.close()

    def _open(self, last_step: int) -> TextIO:
        if self._file is None:
            drop_later_steps(self.path, last_step)
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        return self._file


def metrics_line(row: Step) -> dict[str, Any]:
    """Return what `metrics.jsonl` says about a step; values that are not finite become null."""
    return {
        "step": row.step,
        "epoch": row.epoch,
        "time": round(row.time, 6),
        "num_samples": row.num_samples,
        "loss": real(row.loss),
        "samples_per_s": None if row.samples_per_s is None else round(row.samples_per_s, 3),
        "skipped": row.skipped,
        "seconds": {name: round(value, 6) for name, value in row.seconds.items()},
        **{name: real(value) for name, value in row.metrics.items()},
    }


def drop_later_steps(path: Path, last_step: int) -> None:
    """Remove the lines of steps after `last_step`, and unreadable ones; the file is replaced in one instant."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
            num_dropped = 0
            for line in old:
                if line.endswith("\n") and _step(line) <= last_step:
                    new.write(line)
                else:
                    num_dropped += 1
            new.flush()
            os.fsync(new.fileno())
        if num_dropped:
            os.replace(temporary, path)
    except FileNotFoundError:  # a new run
        return
    finally:
        temporary.unlink(missing_ok=True)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):  # cut off by a kill in the middle of a write
        return float("inf")
