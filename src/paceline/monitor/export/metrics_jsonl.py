"""Writes RUN/metrics.jsonl: one line for each committed step, over all attempts, no step twice.

A continued run takes some steps again from a checkpoint. Lines of steps after that checkpoint are dropped first, and so
are those of attempts that did not lead to it. Lines that a killed supervisor did not write are taken from the workers'
events. So the file always has one history: that of the present state, from the first step to the last.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import writing
from paceline.events import Record, WorkerStarted
from paceline.monitor.records.attempt_history import AttemptSteps, lineage, resume_points, steps_between
from paceline.monitor.records.steps import Step, real

__all__ = ["MetricsFile", "metrics_line"]


class MetricsFile:
    """Appends the steps of an attempt to `metrics.jsonl`, a line each, readable at once; RunFileError where it cannot.

    `path` is in the run's directory, where earlier attempts are looked for.
    """

    def __init__(self, path: Path, *, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self._file: TextIO | None = None
        self._line: list[AttemptSteps] = []  # that the file has
        self._has_stepped = False

    def accept(self, item: Record | Step) -> None:
        with writing(self.path):
            if isinstance(item, Step):
                if not self._has_stepped:  # the script may have gone back to another checkpoint since it began
                    self._has_stepped = True
                    self._begin(item.step - 1)
                self._open().write(_text(item, self._attempt))
            elif isinstance(item.event, WorkerStarted) and self._file is None:
                self._begin(item.event.resumed_from_step)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with writing(self.path):
                file.close()

    def _begin(self, last_step: int) -> None:
        """Write all steps before this attempt's own. `last_step`: before them, by what is known of this
        attempt beside its ledgers."""
        begun = resume_points(self.path.parent, until_attempt=self._attempt)
        line = list(lineage(self._attempt, begun))
        if line == self._line:
            return
        self._line = line
        if self._attempt in begun:
            last_step = begun[self._attempt].from_step

        def counts(step: int, attempt: int | None) -> bool:
            return step <= last_step and any(step in one and attempt in (None, one.attempt) for one in line)

        before = [one for one in line if one.attempt != self._attempt]
        self.close()
        written = drop_others(self.path, counts)
        whole = next(step for step in itertools.count(line[-1].after) if step + 1 not in written)  # all until there
        missing = [
            (attempt, row)
            for attempt, row in steps_between(self.path.parent, before, after=whole, until=last_step)
            if row.step not in written
        ]
        self._open().writelines(_text(row, attempt) for attempt, row in missing)

    def _open(self) -> TextIO:
        if self._file is None:
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by close()
        return self._file


def metrics_line(row: Step, *, attempt: int) -> dict[str, Any]:
    """Return what `metrics.jsonl` says about a step; values that are not finite become null."""
    return {
        "step": row.step,
        "attempt": attempt,
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


def _text(row: Step, attempt: int) -> str:
    return json.dumps(metrics_line(row, attempt=attempt), allow_nan=False) + "\n"


def drop_others(path: Path, counts: Callable[[int, int | None], bool]) -> set[int]:
    """Remove the lines that do not count by their step and attempt (None: it says none), and unreadable ones; the file
    is replaced in one instant.

    Returns the steps that are left. Where replicas take steps by themselves, their lines are in no order.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(path, encoding="utf-8", errors="replace") as old, open(temporary, "w", encoding="utf-8") as new:
            num_dropped, kept = 0, set[int]()
            for line in old:
                place = _place(line) if line.endswith("\n") else None
                if place is not None and counts(*place):
                    new.write(line)
                    kept.add(place[0])
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


def _place(line: str) -> tuple[int, int | None] | None:
    """The step of a line and its attempt, which lines of earlier versions do not say."""
    try:
        said = json.loads(line)
        return int(said["step"]), int(said["attempt"]) if "attempt" in said else None
    except (ValueError, TypeError, KeyError):  # cut off by a kill in the middle of a write
        return None
