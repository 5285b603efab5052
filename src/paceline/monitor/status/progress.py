"""How far a run has come, whether it stands still, and what went wrong, from the ends of its files.

Speeds are medians over the last steps: the last step alone may be a short batch, or one that waited.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.events import Record, StreamOpened, Warned, WorkerFailed
from paceline.logs.log_reader import last_lines, lines_of
from paceline.logs.metric_rows import read_row
from paceline.monitor.console.progress import number_text, rate_text
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.event_reader import attempt_dir, decode_event
from paceline.monitor.records.run_files import worker_number
from paceline.monitor.records.run_record import RunRecord
from paceline.units import duration_text

__all__ = ["Progress", "RunTrouble", "opened_stream"]

NUM_STEPS = 20  # over which speeds are measured
NUM_FIRST_LINES = 200  # of a worker's events, in which it opens the data
STILL_S = 5.0  # without a step, and
STILL_STEPS = 10  # for as long as so many of them usually take: that is worth a word


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The last committed step, and how the ones before it went."""

    step: int
    last_step: int | None  # at which the run is to end; None: not known
    epoch: int | None  # from 0
    epochs: int | None
    loss: float | None
    samples_per_s: float | None
    step_s: float | None  # what one of the last steps took
    since_step_s: float | None  # since the last one was committed, where the attempt has committed any
    loss_scale: float | None = None  # in fp16
    has_own_loop: bool = False  # the program takes the steps and saves by itself: nobody counts samples

    @classmethod
    def of(cls, record: RunRecord, damaged: DamagedLines) -> Progress:
        """Read `metrics.jsonl` from its end, and what the workers said when they opened the data."""
        rows = _last_rows(record.run_dir / "metrics.jsonl", damaged)
        row = rows[0] if rows else {}
        opened = opened_stream(attempt_dir(record.run_dir, record.attempt))
        most = record.job.get("max_steps")
        ends = [most if type(most) is int else None, None if opened is None else opened.last_step]
        when = row.get("time", 0.0)
        of_program = record.job.get("run_for") is not None  # its rows come when its framework writes its buffers
        return cls(
            step=row.get("step", 0),
            last_step=min((end for end in ends if end is not None), default=None),
            epoch=row.get("epoch"),
            epochs=None if opened is None else opened.epochs,
            loss=next((each["loss"] for each in rows if "loss" in each), None) if of_program else row.get("loss"),
            samples_per_s=_median(each.get("samples_per_s") for each in rows),
            step_s=_median(each.get("seconds", {}).get("total") for each in rows),
            since_step_s=clock.now() - when if when > record.started and not of_program else None,
            loss_scale=scale if isinstance(scale := row.get("loss_scale"), (int, float)) else None,
            has_own_loop=bool(rows) and not any(each.get("num_samples") for each in rows),
        )

    @property
    def stands_still(self) -> bool:
        """Whether a running run has taken no step for far longer than it usually takes."""
        return self.since_step_s is not None and self.since_step_s > max(STILL_S, STILL_STEPS * (self.step_s or 0.0))

    def text(self) -> str:
        """Return "step 120 of 400  epoch 2 of 3  loss 2.314  512 samples/s"; epochs from 1, as people count."""
        parts = [f"step {self.step}" + (f" of {self.last_step}" if self.last_step else "")]
        if self.epoch is not None:
            last = max(self.epochs or 1, self.epoch + 1)
            of = "" if self.epochs is None else f" of {last}"
            parts += [f"epoch {self.epoch + 1}{of}"] if last > 1 else []
        if self.loss is not None:
            parts.append(f"loss {number_text(self.loss)}")
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale:.0f}")
        if self.samples_per_s is not None:
            parts.append(f"{rate_text(self.samples_per_s)} samples/s")
        elif self.step_s:
            parts.append(f"{rate_text(1 / self.step_s)} steps/s")
        return "  ".join(parts)

    def still_text(self) -> str:
        usually = f" (the last ones took {duration_text(self.step_s)})" if self.step_s else ""
        return f"NO STEP for {duration_text(self.since_step_s or 0.0)}{usually}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunTrouble:
    """What the supervisor has said of it."""

    error: str | None  # of the worker that failed first, in one sentence
    warning: str | None  # the last one, where no step was committed since
    warned_s: float | None  # how long ago

    def warning_text(self) -> str:
        return f"WARNING, {duration_text(max(self.warned_s or 0.0, 0.0))} ago: {self.warning}"

    @classmethod
    def of(cls, said: Sequence[Record], progress: Progress) -> RunTrouble:
        """Find it in the supervisor's events of an attempt, by time."""
        failed = [each.event for each in said if isinstance(each.event, WorkerFailed)]
        error = next((event.reason for event in failed if not event.follows), None)
        warned = next((each for each in reversed(said) if isinstance(each.event, Warned)), None)
        if warned is None or not isinstance(warned.event, Warned):
            return cls(error=error, warning=None, warned_s=None)
        age_s = clock.now() - warned.time
        if progress.since_step_s is not None and age_s > progress.since_step_s:
            return cls(error=error, warning=None, warned_s=None)
        return cls(error=error, warning=warned.event.text, warned_s=age_s)


def _last_rows(path: Path, damaged: DamagedLines) -> list[dict[str, Any]]:
    """The newest first."""
    return list(damaged.read(path, itertools.islice(last_lines(path), NUM_STEPS), read_row))


def opened_stream(directory: Path) -> StreamOpened | None:
    """What the first worker that has opened the data said of it; the newest word of several."""
    places = [(worker_number(place.name), place) for place in directory.glob("worker_*")]
    for _, place in sorted((number, place) for number, place in places if number is not None):
        found: StreamOpened | None = None
        for line in itertools.islice(lines_of(place / "events.jsonl"), NUM_FIRST_LINES):
            event = decode_event(line) if '"StreamOpened"' in line else None
            if event is not None and isinstance(event.event, StreamOpened):
                found = event.event
        if found is not None:
            return found
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
