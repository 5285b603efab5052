"""A run's prediction and its receipt, as `prediction.json` and `receipt.json` of its directory have them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from paceline.plain_data import fitted, read_object
from paceline.planner.correction import Correction
from paceline.planner.receipt import MeasuredStep, Receipt
from paceline.planner.search import PricedPlan
from paceline.private_files import replace_private
from paceline.regular_files import read_regular
from paceline.units import duration_text, gigabytes_text

__all__ = ["BEING_MADE", "PREDICTION_FILE", "RECEIPT_FILE", "TOO_LATE", "PredictedStep", "RunPrediction", "RunReceipt"]

BEING_MADE = "it is being made"  # the problem of a prediction that is not there yet
TOO_LATE = "the run ended before it was made"
PREDICTION_FILE, RECEIPT_FILE = "prediction.json", "receipt.json"
MOST_BYTES = 1 << 20  # of either file


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _RunFile:
    """Plain data that lies in a run's directory as one JSON object."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a file; None where it is not there, or is damaged or of another version."""
        try:
            found = fitted(cls, read_object(read_regular(path, MOST_BYTES)))
        except (OSError, ValueError):
            return None
        return found if all(0 < number < math.inf for number in found.numbers()) else None

    def numbers(self) -> Iterator[float]:
        """Those that no step and no memory has as 0 or less."""
        yield from ()

    def write(self, path: Path) -> None:
        """Replace the file in one instant. Raises OSError."""
        replace_private(path, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """What a step of a run's plan was predicted to cost.

    `step_s`, `parts` and `bytes` are corrected by `corrected_by` receipts of the cluster (`corrected_of`: whose), and
    `low_s` to `high_s` is the 80 % band. The `estimated` ones are the cost model's own. `model` is the model's
    signature; `remarks` say what was not counted on the script's data, or left out.
    """

    model: str
    plan: str
    micro: int
    workers: int
    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    bytes: float
    estimated_s: float
    estimated_parts: Mapping[str, float]
    estimated_bytes: float
    corrected_by: int
    corrected_of: str
    is_cpu: bool
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: str, priced: PricedPlan, correction: Correction, *, wide: float, remarks: tuple[str, ...] = ()
    ) -> PredictedStep:
        """`wide`: the factor from the prediction to each end of its band."""
        return cls(
            model=model,
            plan=str(priced.plan),
            micro=priced.plan.batch.resolved_micro,
            workers=priced.case.axes.workers,
            step_s=priced.step.step_s,
            low_s=priced.step.step_s / wide,
            high_s=priced.step.step_s * wide,
            parts={name: value for name, value in priced.step.parts.items() if value},
            bytes=priced.memory.peak,
            estimated_s=priced.estimated.step_s,
            estimated_parts={name: value for name, value in priced.estimated.parts.items() if value},
            estimated_bytes=priced.estimated_bytes,
            corrected_by=correction.receipts,
            corrected_of=correction.of,
            is_cpu=priced.case.cluster.device.is_synchronous,
            remarks=remarks,
        )

    def receipt(self, measured: MeasuredStep) -> Receipt:
        """Return the cost model's own prediction beside what was measured: from this the next one learns."""
        return Receipt(
            model=self.model,
            plan=self.plan,
            micro=self.micro,
            workers=self.workers,
            predicted_s=self.estimated_s,
            predicted_parts=self.estimated_parts,
            predicted_bytes=self.estimated_bytes,
            measured_s=measured.step_s,
            measured_parts=measured.parts,
            measured_bytes=measured.peak,
        )

    @property
    def text(self) -> str:
        """Return "19 ms a step (80 % band: 14 to 26 ms), 0.3 GB in a worker"."""
        band = f"80 % band: {duration_text(self.low_s)} to {duration_text(self.high_s)}"
        return f"{duration_text(self.step_s)} a step ({band}), {gigabytes_text(self.bytes)} GB in a worker"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPrediction(_RunFile):
    """What was predicted for an attempt of a run, or why nothing was.

    `receipts` is the file in which the cluster's receipts are kept, None for a cluster of the catalogue. `made` is when
    it was made, as clock.now(): steps before it shared the machine with the process that made it.
    """

    cluster: str
    attempt: int
    receipts: str | None = None
    predicted: PredictedStep | None = None
    problem: str = ""
    made: float = 0.0

    def numbers(self) -> Iterator[float]:
        """See above."""
        if (one := self.predicted) is not None:
            yield from (one.step_s, one.low_s, one.high_s, one.bytes, one.estimated_s, one.estimated_bytes)
            yield from one.estimated_parts.values()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunReceipt(_RunFile):
    """Predicted beside measured, of an attempt of a run.

    `receipt` compares the cost model's own prediction, by part. `predicted_s` and `predicted_bytes` are what was said
    before the run, corrected by `corrected_by` receipts. `kept`: the file of receipts that has it; None with the reason
    in `not_kept`.
    """

    cluster: str
    attempt: int
    steps: int  # that were measured
    receipt: Receipt
    predicted_s: float
    predicted_bytes: float
    corrected_by: int
    corrected_of: str
    blame: str = ""
    kept: str | None = None
    not_kept: str = ""

    def numbers(self) -> Iterator[float]:
        """See above."""
        one = self.receipt
        yield from (self.predicted_s, self.predicted_bytes, one.predicted_s, one.predicted_bytes, one.measured_s)
        yield from one.predicted_parts.values()
        yield from (1.0 + value for value in one.measured_parts.values())  # a part may take no time
        yield 1.0 + (one.measured_bytes or 0.0)

    @classmethod
    def of(
        cls, cluster: str, attempt: int, predicted: PredictedStep, measured: MeasuredStep, *, blame: str
    ) -> RunReceipt:
        """Put both side by side; it is kept nowhere so far."""
        return cls(
            cluster=cluster,
            attempt=attempt,
            steps=measured.steps,
            receipt=predicted.receipt(measured),
            predicted_s=predicted.step_s,
            predicted_bytes=predicted.bytes,
            corrected_by=predicted.corrected_by,
            corrected_of=predicted.corrected_of,
            blame=blame,
        )

    @property
    def summary(self) -> str:
        """Return "a step took 21 ms, predicted 19 ms (+11 %); memory 0.31 GB, predicted 0.3 GB (+3 %)"."""
        took = self.receipt.measured_s
        text = f"a step took {duration_text(took)}, predicted {duration_text(self.predicted_s)}"
        text += f" ({(took / self.predicted_s - 1) * 100:+.0f} %)"
        if (held := self.receipt.measured_bytes) is None:
            return text
        text += f"; memory {gigabytes_text(held)} GB, predicted {gigabytes_text(self.predicted_bytes)} GB"
        return f"{text} ({(held / self.predicted_bytes - 1) * 100:+.0f} %)"

    def lines(self) -> Iterator[str]:
        """The receipt as a table, and its remarks."""
        yield from self.receipt.table(left=self.left)
        for remark in self.remarks():
            yield f"         {remark}"

    @property
    def left(self) -> str:
        """What the table compares with: a prediction that receipts have corrected has no parts of its own."""
        return "cost model" if self.corrected_by else "predicted"

    def remarks(self) -> Iterator[str]:
        """What stands below the table."""
        if self.blame:
            yield self.blame
        if self.corrected_by:
            told = "1 receipt" if self.corrected_by == 1 else f"{self.corrected_by} receipts"
            yield (
                f"corrected by {told} of {self.corrected_of}, the prediction was {duration_text(self.predicted_s)} and "
                f"{gigabytes_text(self.predicted_bytes)} GB"
            )
        if self.kept is not None:
            yield f"kept in {self.kept}: the next predictions for this cluster are corrected by it"
        elif self.not_kept:
            yield f"not kept: {self.not_kept}"
