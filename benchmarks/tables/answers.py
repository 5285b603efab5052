"""Answers for rows: predicted seconds and bytes with their bands, and what was assumed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.planner.constants import Calibration
from paceline.planner.memory import predict_memory, verdict
from paceline.planner.predict import Workload
from tables.rows import Reading, measured_s, read_row

__all__ = ["Answer", "Receipt", "answer", "receipts"]

RECEIPT_SHARE = 0.6  # how much of a receipt's error the other rows have, too; the rest is its own
DEFAULT_SPREADS = {
    "software": 0.12,
    "none": 0.25,
    "receipt": 0.1,
    "special": 0.4,
    "memory software": 0.12,
    "memory none": 0.25,
    "memory special": 0.4,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One measured row, by which rows of the same source, model and device are corrected."""

    row: str
    log_error: float  # predicted over measured, with the factor of its source


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is predicted for a row."""

    reading: Reading
    step_s: float
    band: float  # half width of the 80 % band, of the logarithm
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    parts: Mapping[str, float]
    memory: float
    memory_band: float
    fits: str
    receipt: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data: seconds, tokens and samples per second, decimal GB, each with low and high of its band."""
        wide, memory = math.exp(self.band), math.exp(self.memory_band)
        workers = self.reading.case.axes.workers
        return {
            "id": self.reading.id,
            "source": self.reading.title,
            "step_time_s": _short(self.step_s),
            "step_time_s_band": [_short(self.step_s / wide), _short(self.step_s * wide)],
            "tokens_per_s": _short(self.tokens_per_s),
            "tokens_per_s_per_gpu": _short(self.tokens_per_s / workers),
            "samples_per_s": _short(self.samples_per_s),
            "mfu": _short(100 * self.mfu),
            "parts_s": {name: _short(value) for name, value in self.parts.items() if value},
            "memory_gb": _short(self.memory / 1e9),
            "memory_gb_band": [_short(self.memory / 1e9 / memory), _short(self.memory / 1e9 * memory)],
            "fits": self.fits,
            "receipt": self.receipt,
            "assumed": list(self.reading.assumed),
        }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def answer(
    reading: Reading,
    calibration: Calibration,
    *,
    known: bool = True,
    receipt: Receipt | None = None,
) -> Answer:
    """Predict one row. `known=False`: as if its source were unknown."""
    spreads = {**DEFAULT_SPREADS, **calibration.spreads}
    factor = calibration.factors.get(reading.title) if known else None
    memory_factor = calibration.memory_factors.get(reading.title) if known else None
    kind = "none" if factor is None else "software"
    memory_kind = "memory none" if memory_factor is None else "memory software"
    if reading.is_special or reading.is_incomplete:
        kind, memory_kind = "special", "memory special"
    factor = factor or 1.0
    if receipt is not None and receipt.row != reading.id:
        factor *= math.exp(-receipt.log_error * RECEIPT_SHARE)
        kind = "receipt" if kind != "special" else kind
    seconds = Workload(reading.case).predict(calibration.constants, factor)
    memory = predict_memory(reading.case, memory_factor or 1.0)
    return Answer(
        reading=reading,
        step_s=seconds.step_s,
        band=spreads[kind],
        tokens_per_s=seconds.tokens_per_s,
        samples_per_s=reading.case.samples / seconds.step_s,
        mfu=seconds.mfu,
        parts=seconds.parts,
        memory=memory.peak,
        memory_band=spreads[memory_kind],
        fits=verdict(reading.case, memory, half_width=spreads[memory_kind]),
        receipt=None if receipt is None else receipt.row,
    )


def _size(reading: Reading) -> tuple[float, float, str]:
    return reading.case.axes.workers, reading.case.tokens, reading.id


def receipts(rows: Sequence[Mapping[str, Any]], calibration: Calibration) -> dict[str, Receipt]:
    """Return the receipt of each row: the smallest measured one (fewest devices, then tokens) of its source, model and
    device."""
    groups: dict[tuple[str, str, str], list[tuple[Reading, float | None]]] = {}
    for row in rows:
        reading = read_row(row)
        key = (reading.title, str(row["model"].get("name")), reading.case.cluster.device.name)
        is_sound = row.get("kind", "train") == "train" and row.get("grade", "A") != "C"
        groups.setdefault(key, []).append((reading, measured_s(row, reading.case) if is_sound else None))
    found: dict[str, Receipt] = {}
    for members in groups.values():
        timed = [(reading, seconds) for reading, seconds in members if seconds]
        if not timed:
            continue
        reading, seconds = min(timed, key=lambda one: _size(one[0]))
        predicted = answer(reading, calibration).step_s
        receipt = Receipt(row=reading.id, log_error=math.log(predicted / seconds))
        found |= {one.id: receipt for one, _ in members}
    return found
