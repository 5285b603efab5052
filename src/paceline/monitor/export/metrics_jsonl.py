"""Writes RUN/metrics.jsonl: one line for each committed step, over all attempts, no step twice; old lines are thinned.

A continued run takes some steps again from a checkpoint. Lines of steps after that checkpoint are dropped first, and so
are those of attempts that did not lead to it. Lines that a killed supervisor did not write are taken from the workers'
events. So the file always has one history: that of the present state, from the first step to the last.

Past 16 MiB all but the newest 10,000 rows are thinned to a hundredth, which have the means and extremes of the others;
again when the file has doubled. A run that goes back into such a hundred drops it.

Of another framework's program the rows are what it has written for TensorBoard. Each attempt drops those from its own
first step on: the program alone knows where it goes on.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import writing
from paceline.events import Record, StepsMerged, TaskScalars, WorkerStarted
from paceline.logs.log_reader import LONGEST_LINE
from paceline.logs.metric_rows import StepRanges, cut_rows, merge_rows, steps_of_row
from paceline.logs.sealed_log import LineLog, Sealing
from paceline.monitor.records.attempt_history import AttemptSteps, lineage, resume_points, steps_between
from paceline.monitor.records.steps import OWN_NAMES, Step, real
from paceline.plain_data import read_object, whole
from paceline.regular_files import open_regular

__all__ = ["MetricsFile", "metrics_line"]


OVER_BYTES = 1 << 24
THINNING = Sealing(merge=merge_rows, cut=cut_rows, over_bytes=OVER_BYTES, in_place=True)


class MetricsFile:
    """Appends the steps of an attempt to `metrics.jsonl`, a line each, readable at once; RunFileError where it cannot.

    `path` is in the run's directory, where earlier attempts are looked for. `say` gets a sentence where the file cannot
    be thinned, from a thread. `of_program`: another framework takes the steps.
    """

    def __init__(
        self, path: Path, *, attempt: int, say: Callable[[str], None] | None = None, of_program: bool = False
    ) -> None:
        self.path = path
        self._attempt, self._say, self._of_program = attempt, say, of_program
        self._log: LineLog | None = None
        self._line: list[AttemptSteps] = []  # that the file has
        self._has_stepped = False

    def accept(self, item: Record | Step) -> None:
        with writing(self.path):
            if isinstance(item, Step):
                if not self._has_stepped:  # the script may have gone back to another checkpoint since it began
                    self._has_stepped = True
                    self._begin(item.step - 1)
                self._open().write(_text(item, self._attempt))
            elif isinstance(item.event, StepsMerged):
                self._has_stepped = True
                self._open().write(json.dumps(_summed_line(item, item.event, attempt=self._attempt), allow_nan=False))
            elif isinstance(item.event, TaskScalars):
                self._take_of_program(item.event)
            elif isinstance(item.event, WorkerStarted) and self._log is None and not self._of_program:
                self._begin(item.event.resumed_from_step)

    def _take_of_program(self, scalars: TaskScalars) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            drop_others(self.path, lambda step, _: step < scalars.program_step)
        self._open().write(json.dumps(_program_line(scalars, attempt=self._attempt), allow_nan=False))

    def close(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            with writing(self.path):
                log.close()

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
        whole = written.whole_until(line[-1].after)
        missing = [
            (attempt, row)
            for attempt, row in steps_between(self.path.parent, before, after=whole, until=last_step)
            if row.step not in written
        ]
        log = self._open()
        for attempt, row in missing:
            log.write(_text(row, attempt))

    def _open(self) -> LineLog:
        if self._log is None:
            self._log = LineLog(self.path, sealing=THINNING, say=self._say)
        return self._log


def metrics_line(row: Step, *, attempt: int) -> dict[str, Any]:
    """Return what `metrics.jsonl` says about a step; values that are not finite become null."""
    is_loss_known = row.loss is not None or row.num_samples > 0  # else of a program's own loop, which has said nothing
    return {
        "step": row.step,
        "attempt": attempt,
        "epoch": row.epoch,
        "time": round(row.time, 6),
        "num_samples": row.num_samples,
        **({"loss": real(row.loss)} if is_loss_known else {}),
        "samples_per_s": None if row.samples_per_s is None else round(row.samples_per_s, 3),
        "skipped": row.skipped,
        **({"num_dropped": row.num_dropped} if row.num_dropped else {}),
        **({"wire_ratio": round(row.num_wire_bytes / row.num_raw_bytes, 6)} if row.num_raw_bytes else {}),
        **({"noise_scale": round(row.noise_scale, 3)} if row.noise_scale is not None else {}),
        "seconds": {name: round(value, 6) for name, value in row.seconds.items()},
        **{name: real(value) for name, value in row.measured.items()},
    }


def _text(row: Step, attempt: int) -> str:
    return json.dumps(metrics_line(row, attempt=attempt), allow_nan=False)


def _program_line(scalars: TaskScalars, *, attempt: int) -> dict[str, Any]:
    """The row of numbers that a program has written for TensorBoard."""
    return {
        "step": scalars.program_step,
        "attempt": attempt,
        **({} if scalars.epoch is None else {"epoch": scalars.epoch}),
        "time": round(scalars.written, 6),
        **({} if scalars.loss is None else {"loss": real(scalars.loss)}),
        **{
            f"reported_{name}" if name in (*OWN_NAMES, "loss") else name: real(v) for name, v in scalars.metrics.items()
        },
    }


def _summed_line(record: Record, steps: StepsMerged, *, attempt: int) -> dict[str, Any]:
    """The row of steps that were summed up before this process could read them."""
    total_s, num = steps.seconds.get("total", 0.0), steps.num_steps
    speed = steps.num_samples / total_s if total_s > 0 else None
    speeds = None if speed is None else {"mean": speed, "least": speed, "most": speed, "num": num}
    return {
        "step": steps.last_step,
        "attempt": attempt,
        "epoch": steps.epoch,
        "time": round(record.time, 6),
        "num_samples": round(steps.num_samples / num),
        "loss": real(steps.loss.get("last")),
        "samples_per_s": None if speed is None else round(speed, 3),
        "skipped": False,
        "seconds": {name: round(value / num, 6) for name, value in steps.seconds.items()},
        **{name: real(value) for name, value in {**steps.optimizer, **steps.metrics}.items()},
        "merged": {
            "steps": [[steps.first_step, steps.last_step]],
            "num": num,
            "num_skipped": steps.num_skipped,
            "num_samples": steps.num_samples,
            "loss": {**steps.loss, "num": num - steps.num_broken} if steps.loss else None,
            "num_broken": steps.num_broken,
            "samples_per_s": speeds,
            "timed_samples": steps.num_samples if speed else 0,
            "took_s": round(total_s, 6),
            "since": steps.since,
            "seconds": dict(steps.seconds),
        },
    }


def drop_others(path: Path, counts: Callable[[int, int | None], bool]) -> StepRanges:
    """Remove the lines that do not count by their step and attempt (None: it says none), and unreadable ones; the file
    is replaced in one instant.

    Returns the steps that are left. Where replicas take steps by themselves, their lines are in no order.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as old,
            open(temporary, "w", encoding="utf-8") as new,
        ):
            num_dropped, kept = 0, list[tuple[int, int]]()
            for line in iter(lambda: old.readline(LONGEST_LINE), ""):
                steps, attempt = _place(line) if line.endswith("\n") else ([], None)
                if steps and all(counts(step, attempt) for edges in steps for step in edges):
                    new.write(line)
                    kept += steps
                else:
                    num_dropped += 1
            new.flush()
            os.fsync(new.fileno())
        if num_dropped:
            os.replace(temporary, path)
        return StepRanges(kept)
    except FileNotFoundError:  # a new run
        return StepRanges()
    finally:
        temporary.unlink(missing_ok=True)


def _place(line: str) -> tuple[list[tuple[int, int]], int | None]:
    """The steps of a line and its attempt, which lines of earlier versions do not say; no steps: it is damaged."""
    try:
        said = read_object(line)
        return steps_of_row(said), whole(said["attempt"]) if "attempt" in said else None
    except (ValueError, TypeError, KeyError):  # cut off by a kill in the middle of a write
        return [], None
