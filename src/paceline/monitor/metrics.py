"""Writes RUN/metrics.jsonl: one line for each committed step, over all attempts, no step twice.

A continued run takes its steps again from a checkpoint. The lines of the steps after that checkpoint are dropped
first, and those before it that a killed supervisor did not come to write are taken from the workers' events, so that
the file always tells one story from the first step to the last.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import writing
from paceline.events import Record, WorkerStarted
from paceline.monitor.retold import steps_between
from paceline.monitor.steps import Step, real

__all__ = ["MetricsFile", "metrics_line"]


class MetricsFile:
    """Appends the steps of an attempt to `metrics.jsonl`, a line each, readable at once; RunFileError where it cannot.

    `path` is in the run's directory, where earlier attempts are looked for.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self._file: TextIO | None = None

    def accept(self, item: Record | Step) -> None:
        with writing(self.path):
            if isinstance(item, Step):
                self._open(item.step - 1).write(_text(item))
            elif isinstance(item.event, WorkerStarted):
                self._open(item.event.resumed_from_step)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self.path):
                file.close()

    def _open(self, last_step: int) -> TextIO:
        if self._file is None:
            written = drop_later_steps(self.path, last_step)
            whole = next(step for step in itertools.count() if step + 1 not in written)  # all until there
            found = steps_between(self.path.parent, before_attempt=self._attempt, after=whole, until=last_step)
            missing = [row for row in found if row.step not in written]
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by close()
            self._file.writelines(map(_text, missing))
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
        **({"num_dropped": row.num_dropped} if row.num_dropped else {}),
        **({"wire_ratio": round(row.num_wire_bytes / row.num_raw_bytes, 6)} if row.num_raw_bytes else {}),
        **({"noise_scale": round(row.noise_scale, 3)} if row.noise_scale is not None else {}),
        "seconds": {name: round(value, 6) for name, value in row.seconds.items()},
        **{name: real(value) for name, value in row.metrics.items()},
    }


def _text(row: Step) -> str:
    return json.dumps(metrics_line(row), allow_nan=False) + "\n"


def drop_later_steps(path: Path, last_step: int) -> set[int]:
    """Remove the lines of steps after `last_step`, and unreadable ones; the file is replaced in one instant.

    Returns the steps that are left. Where replicas take steps by themselves, their lines are in no order.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
            num_dropped, kept = 0, set[int]()
            for line in old:
                step = _step(line) if line.endswith("\n") else None
                if step is not None and step <= last_step:
                    new.write(line)
                    kept.add(step)
                else:
                    num_dropped += 1
            new.flush()
            os.fsync(new.fileno())
        if num_dropped:
            os.replace(temporary, path)
        return kept
    except FileNotFoundError:  # a new run
        return set()
    finally:
        temporary.unlink(missing_ok=True)


def _step(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):  # cut off by a kill in the middle of a write
        return None
