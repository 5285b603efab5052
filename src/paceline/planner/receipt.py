"""Predicted beside measured: what a run's steps took, what was said before, and what is learned from it.

Receipts lie beside a cluster's file. The next prediction on that cluster is corrected by them: for the same model
and number of workers part by part, for others by the median of measured over predicted.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.plan import Layout, Plan
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.search import PricedPlan
from paceline.planner.step_causes import REST, WorkObserved, cause_of
from paceline.units import duration_text, gigabytes_text

__all__ = [
    "LEAST_STEPS",
    "PARTS_OF",
    "WARM_UP",
    "MeasuredStep",
    "Receipt",
    "ReceiptRow",
    "correction_of",
    "measured_step",
    "read_receipts",
]

# What a worker's step log tells apart, and the predicted parts that go into it. Workers wait within communication.
PARTS_OF: Mapping[str, tuple[str, ...]] = {
    "compute": ("products", "attention", "moves", "launches", "head", "recompute", "packing"),
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
class ReceiptRow:
    """One quantity, predicted and measured, in seconds or in bytes."""

    name: str
    predicted: float
    measured: float
    is_bytes: bool = False

    @property
    def texts(self) -> tuple[str, str, str]:
        """Both values with their units, and by how much the measured one is more; "" where none was predicted."""
        change = f"{(self.measured / self.predicted - 1) * 100:+.0f} %" if self.predicted > 0 else ""
        return self._text(self.predicted), self._text(self.measured), change

    def _text(self, value: float) -> str:
        return f"{gigabytes_text(value)} GB" if self.is_bytes else duration_text(value)


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

    def rows(self) -> Iterator[ReceiptRow]:
        """The step, its parts, and a worker's memory where it is known."""
        yield ReceiptRow(name="step", predicted=self.predicted_s, measured=self.measured_s)
        for name in PARTS_OF:
            yield ReceiptRow(name=name, predicted=self.predicted_of(name), measured=self.measured_parts.get(name, 0.0))
        rest = self.measured_s - sum(self.measured_parts.values())
        if rest > 0.01 * self.measured_s:
            yield ReceiptRow(name="other", predicted=0.0, measured=rest)
        if self.measured_bytes is not None:
            yield ReceiptRow(name="memory", predicted=self.predicted_bytes, measured=self.measured_bytes, is_bytes=True)

    def lines(self) -> Iterator[str]:
        """The receipt as a table, and the part that is most to blame for the difference."""
        yield from self.table()
        if blame := self.blame():
            yield f"         {blame}"

    def table(self, *, left: str = "predicted") -> Iterator[str]:
        """A line for each of `rows`, below a head; `left` is what stands over the prediction."""
        yield f"receipt  {'':13}  {left:>10}  {'measured':>10}"
        for row in self.rows():
            predicted, measured, change = row.texts
            yield f"         {row.name:13}  {predicted:>10}  {measured:>10}  {change}".rstrip()

    def blame(self, seen: WorkObserved | None = None) -> str:
        """Return which part differs most, and why as far as `seen` says it; "" where the two agree."""
        name, error = max(self._errors().items(), key=lambda one: abs(one[1]))
        if abs(error) <= 0.02 * self.measured_s:
            return ""
        more = "longer" if error > 0 else "shorter"
        cause = cause_of(name, error, seen or WorkObserved())
        told = f"most of the difference: {name} took {duration_text(abs(error))} {more} than predicted"
        return f"{told} ({cause})" if cause else told

    def _errors(self) -> dict[str, float]:
        errors = {name: self.measured_parts.get(name, 0.0) - self.predicted_of(name) for name in PARTS_OF}
        return errors | {REST: self.measured_s - sum(self.measured_parts.values())}

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


def correction_of(receipts: Sequence[Receipt], model: str, plan: Plan, *, workers: int) -> Correction:
    """Return what receipts of a cluster say about a plan's steps on so many workers.

    Receipts of this model and as many workers correct part by part. Compute: those with the nearest micro-batch, and of
    these those with the same cuts, if there are any. The optimizer and memory: those with the same cuts, or else all,
    with the nearest micro-batch. Communication, as a share of what is predicted for it or as an addition: those with
    the same cuts only, since others exchange other things. Others of this model, or else of any, correct by the median
    of measured over predicted steps.
    """
    same = [one for one in receipts if one.model == model]
    there = [one for one in same if one.workers == workers]
    if there:
        micro = plan.batch.resolved_micro
        cuts = _cuts(plan)
        alike = [one for one in there if _cuts_of(one.plan) == cuts]
        close = _nearest(there, micro)
        close = [one for one in close if one in alike] or close
        rests = [_rest(one, _ratio([one], "compute")) for one in _nearest(alike, micro)] or [(1.0, 0.0)]
        weighed = [one for one in alike or there if one.measured_bytes is not None]
        beyond = [one.measured_bytes - one.predicted_bytes for one in _nearest(weighed, micro) if one.measured_bytes]
        return Correction(
            compute=_ratio(close, "compute"),
            packing=_ratio(close, "compute") if alike else 1.0,  # which the cluster's file has as measured in steps
            optimizer=_ratio(_nearest(alike or there, micro), "optimizer"),
            communication=statistics.median(share for share, _ in rests),
            added_s=statistics.median(added_s for _, added_s in rests),
            added_bytes=statistics.median(beyond) if beyond else 0.0,
            receipts=len(close),
            of=f"this model on {workers} {'worker' if workers == 1 else 'workers'}",
            is_same=True,
        )
    if not receipts:
        return UNCORRECTED
    factor = statistics.median(one.ratio for one in (same or receipts))
    return Correction(
        compute=factor,
        packing=factor,
        optimizer=factor,
        communication=factor,
        receipts=len(same or receipts),
        of="this model" if same else "other models",
    )


def _nearest(receipts: Sequence[Receipt], micro: int) -> Sequence[Receipt]:
    """Those whose micro-batch is the nearest to one of `micro` samples, by their ratio."""
    away = min((_away(one, micro) for one in receipts), default=0.0)
    return [one for one in receipts if _away(one, micro) == away]


@functools.lru_cache(maxsize=4096)
def _cuts_of(text: str) -> Layout:
    """Those of a receipt's plan; each plan of a search is compared with all receipts."""
    return _cuts(Plan.parse(text))


def _cuts(plan: Plan) -> Layout:
    """What workers divide among themselves, however they then order it."""
    return dataclasses.replace(plan.layout, replicas=1, schedule="1f1b", sequence=False)


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
