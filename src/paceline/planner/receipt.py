"""Predicted beside measured: what a run's steps took, what was said before, and what is learned from it.

Receipts lie beside a cluster's file. The next prediction on that cluster is corrected by them: for the same model
and number of workers part by part, for others by the median of measured over predicted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.search import PricedPlan
from paceline.units import duration_text, gigabytes_text

__all__ = ["PARTS_OF", "MeasuredStep", "Receipt", "correction_of", "measured_step", "read_receipts"]

# What a worker's step log tells apart, and the predicted parts that go into it. Workers wait within communication.
PARTS_OF: Mapping[str, tuple[str, ...]] = {
    "compute": ("products", "attention", "moves", "launches", "head", "recompute"),
    "communication": ("tensor", "context", "experts", "sends", "data", "coding", "idle", "straggle"),
    "optimizer": ("optimizer", "offload"),
    "data": (),  # waiting for samples: not predicted
}
WAITING = ("idle", "straggle")  # within communication, and as long as compute makes it
WARM_UP = 2  # steps that are not like the others: buffers are made, algorithms timed
LEAST_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Seconds of a run's median step, of its parts, and the most bytes of a worker."""

    step_s: float
    parts: Mapping[str, float]
    peak: float | None
    steps: int


def measured_step(rows: Iterable[Mapping[str, Any]], *, peak: float | None) -> MeasuredStep | None:
    """Return the median of a run's rows of metrics, without the first ones; None where too few are left."""
    found = [row["seconds"] for row in rows if "seconds" in row][WARM_UP:]
    if len(found) < LEAST_STEPS:
        return None
    parts = {name: statistics.median(float(one.get(name, 0.0)) for one in found) for name in PARTS_OF}
    step_s = statistics.median(float(one["total"]) for one in found)
    return MeasuredStep(step_s=step_s, parts=parts, peak=peak, steps=len(found))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One plan of one model, predicted without any correction, and measured. `model` is its signature."""

    model: str
    plan: str
    micro: int  # samples of a micro-batch
    workers: int
    predicted_s: float
    predicted_parts: Mapping[str, float]
    predicted_bytes: float
    measured_s: float
    measured_parts: Mapping[str, float]
    measured_bytes: float | None

    @classmethod
    def of(
        cls,
        model: str,
        priced: PricedPlan,
        measured: MeasuredStep,
    ) -> Receipt:
        """Put both side by side."""
        return cls(
            model=model,
            plan=str(priced.plan),
            micro=priced.plan.batch.resolved_micro,
            workers=priced.case.axes.workers,
            predicted_s=priced.estimated.step_s,
            predicted_parts={name: value for name, value in priced.estimated.parts.items() if value},
            predicted_bytes=priced.estimated_bytes,
            measured_s=measured.step_s,
            measured_parts=dict(measured.parts),
            measured_bytes=measured.peak,
        )

    def predicted_of(self, name: str) -> float:
        """Predicted seconds of what the step log calls `name`."""
        return sum(self.predicted_parts.get(part, 0.0) for part in PARTS_OF[name])

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.measured_s / self.predicted_s

    def lines(self) -> Iterator[str]:
        """The receipt as a table, and the part that is most to blame for the difference."""
        yield f"receipt  {'':13}  {'predicted':>10}  {'measured':>10}"
        yield self._line("step", self.predicted_s, self.measured_s)
        for name in PARTS_OF:
            yield self._line(name, self.predicted_of(name), self.measured_parts.get(name, 0.0))
        rest = self.measured_s - sum(self.measured_parts.values())
        if rest > 0.01 * self.measured_s:
            yield self._line("other", 0.0, rest)
        if self.measured_bytes is not None:
            before, after = (gigabytes_text(one) + " GB" for one in (self.predicted_bytes, self.measured_bytes))
            change = (self.measured_bytes / self.predicted_bytes - 1) * 100
            yield f"         {'memory':13}  {before:>10}  {after:>10}  {change:+.0f} %"
        name, error = max(self._errors().items(), key=lambda one: abs(one[1]))
        more = "longer" if error > 0 else "shorter"
        if abs(error) > 0.02 * self.measured_s:
            yield f"         most of the difference: {name} took {duration_text(abs(error))} {more} than predicted"

    def _line(self, name: str, predicted: float, measured: float) -> str:
        change = f"  {(measured / predicted - 1) * 100:+.0f} %" if predicted > 0 else ""
        return f"         {name:13}  {duration_text(predicted):>10}  {duration_text(measured):>10}{change}"

    def _errors(self) -> dict[str, float]:
        errors = {name: self.measured_parts.get(name, 0.0) - self.predicted_of(name) for name in PARTS_OF}
        return errors | {"what is in no part": self.measured_s - sum(self.measured_parts.values())}

    def append_to(self, path: Path) -> None:
        """Keep it in a file of receipts, a line each."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def read_receipts(path: Path) -> list[Receipt]:
    """Read the receipts of a file, none if it is not there; PlanError, with the line, for what is none."""
    if not path.exists():
        return []
    found: list[Receipt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            one = Receipt(**json.loads(line))
            if not (0 < one.ratio < math.inf and one.micro >= 1):
                raise ValueError(f"measured over predicted is {one.ratio}, the micro-batch {one.micro}")
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise PlanError(f"{path}: line {number} is no receipt ({error}). Delete the line, or the file.") from error
        found.append(one)
    return found


def correction_of(receipts: Sequence[Receipt], model: str, *, micro: int, workers: int) -> Correction:
    """Return what receipts of a cluster say about a model's steps on so many workers, in micro-batches of `micro`.

    Receipts of this model and as many workers correct part by part: compute, the optimizer, and the rest of a step as
    an addition; those with the nearest micro-batch count. Others of this model, or else of any, correct by the median
    of measured over predicted steps.
    """
    same = [one for one in receipts if one.model == model]
    there = [one for one in same if one.workers == workers]
    if there:
        away = min(_away(one, micro) for one in there)
        close = [one for one in there if _away(one, micro) == away]
        compute = _ratio(close, "compute")
        rests = [_rest(one, compute) for one in close]
        beyond = [one.measured_bytes - one.predicted_bytes for one in close if one.measured_bytes is not None]
        return Correction(
            compute=compute,
            optimizer=_ratio(close, "optimizer"),
            communication=statistics.median(share for share, _ in rests),
            added_s=statistics.median(added_s for _, added_s in rests),
            added_bytes=statistics.median(beyond) if beyond else 0.0,
            receipts=len(close),
            of=f"this model on {workers} {'worker' if workers == 1 else 'workers'}",
        )
    if not receipts:
        return UNCORRECTED
    factor = statistics.median(one.ratio for one in (same or receipts))
    return Correction(
        compute=factor,
        optimizer=factor,
        communication=factor,
        receipts=len(same or receipts),
        of="this model" if same else "other models",
    )


def _away(one: Receipt, micro: int) -> float:
    return abs(math.log2(one.micro / micro))


def _ratio(receipts: Sequence[Receipt], name: str) -> float:
    ratios = [
        one.measured_parts[name] / one.predicted_of(name)
        for one in receipts
        if one.predicted_of(name) > 0 and one.measured_parts.get(name)
    ]
    return statistics.median(ratios) if ratios else 1.0


def _rest(one: Receipt, compute: float) -> tuple[float, float]:
    """What a step has beside compute and the optimizer: as a share of its predicted communication, or beyond that."""
    seconds = one.measured_s - one.measured_parts.get("compute", 0.0) - one.measured_parts.get("optimizer", 0.0)
    of_compute = sum(value for name, value in one.predicted_parts.items() if name in WAITING)
    predicted = one.predicted_of("communication") - of_compute
    left = max(0.0, seconds - compute * of_compute)
    return (1.0, left - predicted) if left >= predicted else (left / predicted, 0.0)
