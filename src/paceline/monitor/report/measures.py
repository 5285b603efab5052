"""What a run has reported beside its loss: metrics of `worker.report` by step, and evaluations."""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.events import Evaluated
from paceline.logs.log_reader import lines_of
from paceline.logs.metric_rows import read_row
from paceline.monitor.records.damaged_lines import DamagedLines
from paceline.monitor.records.steps import OWN_NAMES
from paceline.monitor.report.attempt_log import AttemptLog
from paceline.monitor.report.curves import Point, thinned
from paceline.units import name_text

__all__ = ["Measure", "read_measures"]

MOST_MEASURES = 60  # of each kind; a page with more of them helps nobody
MOST_VALUES = 1 << 20  # of a metric in memory; beyond that every second one is kept
COLUMNS = OWN_NAMES | {"loss", "merged"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A reported metric, or a measure of an evaluation, over steps."""

    name: str
    is_evaluation: bool
    points: tuple[Point, ...]
    num: int  # values, of the rows that are there
    first: float
    last: float
    least: float
    most: float


def read_measures(
    metrics: Path, logs: Sequence[AttemptLog], damaged: DamagedLines | None = None
) -> tuple[Measure, ...]:
    """Return evaluations and then metrics, each by name, at most `MOST_MEASURES` of a kind. Values that are not finite
    are left out."""
    reported: dict[str, _Values] = {}
    for row in (damaged or DamagedLines()).read(metrics, lines_of(metrics), read_row):
        for name, value in row.items():
            if name in COLUMNS or not _is_finite(value):
                continue
            values = reported.get(name)
            if values is None and len(reported) < MOST_MEASURES:
                values = reported[name] = _Values()
            if values is not None:
                values.add(row["step"], value)
    found = [_evaluation(name, by_step) for name, by_step in sorted(_evaluated(logs).items())[:MOST_MEASURES]]
    return (*found, *(values.measure(name) for name, values in sorted(reported.items())))


class _Values:
    """Steps and values of one metric, in the file's order; bounded."""

    def __init__(self) -> None:
        self._steps, self._values = array("d"), array("d")
        self._first = self._last = self._least = self._most = 0.0
        self._num, self._stride = 0, 1

    def add(self, step: int, value: float) -> None:
        if not self._num:
            self._first = self._least = self._most = value
        self._last, self._least, self._most = value, min(self._least, value), max(self._most, value)
        if self._num % self._stride == 0:
            self._steps.append(step)
            self._values.append(value)
        self._num += 1
        if len(self._steps) > MOST_VALUES:
            self._steps, self._values, self._stride = self._steps[::2], self._values[::2], 2 * self._stride

    def measure(self, name: str) -> Measure:
        return Measure(
            name=name_text(name),
            is_evaluation=False,
            points=_in_order(self._steps, self._values),
            num=self._num,
            first=self._first,
            last=self._last,
            least=self._least,
            most=self._most,
        )


def _evaluated(logs: Sequence[AttemptLog]) -> Mapping[str, dict[int, float]]:
    """Values by measure and step; where a step was taken again, the later ones."""
    found: dict[str, dict[int, float]] = {}
    for log in logs:
        for record in log.records:
            if isinstance(record.event, Evaluated):
                for name, value in record.event.metrics.items():
                    if _is_finite(value):
                        found.setdefault(name, {})[record.event.step] = value
    return found


def _evaluation(name: str, by_step: Mapping[int, float]) -> Measure:
    steps = sorted(by_step)
    values = [by_step[step] for step in steps]
    return Measure(
        name=name_text(name),
        is_evaluation=True,
        points=thinned(steps, values),
        num=len(values),
        first=values[0],
        last=values[-1],
        least=min(values),
        most=max(values),
    )


def _in_order(steps: Sequence[float], values: Sequence[float]) -> tuple[Point, ...]:
    """Thin a curve. Where replicas take steps by themselves, their rows are in no order."""
    if any(after < before for before, after in itertools.pairwise(steps)):
        pairs = sorted(zip(steps, values, strict=True))
        steps, values = [step for step, _ in pairs], [value for _, value in pairs]
    return thinned(steps, values)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
