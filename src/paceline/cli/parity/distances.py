"""How far a captured tensor is from its reference, and how far rounding alone would bring it. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from paceline.cli.parity.module_records import Array, StepRecords, TensorRecord, rms

__all__ = ["distance", "figure", "floor_of", "noise_of"]


def noise_of(record: TensorRecord, theirs: StepRecords, noisy: StepRecords) -> float:
    found = [noisy.array(one) for one in noisy.parts(record)]
    return distance(found[0], theirs.array(record)) if found else 0.0


def floor_of(noises: Iterable[float], arrays: Iterable[Array]) -> float:
    """The least noise that a tensor is taken to have: the median of its kind, or one rounding."""
    finite = [noise for noise in noises if math.isfinite(noise) and noise > 0]
    types = {array.dtype for array in arrays if array.dtype.kind == "f"}
    rounding = max((float(np.finfo(kind).eps) for kind in types), default=0.0)
    return max(float(np.median(finite)) if finite else 0.0, rounding)


def distance(a: Array | None, b: Array | None, *, scale: float | None = None) -> float:
    """rms(a - b) over rms(b), or over another scale; infinite where one of them is missing or not finite."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        difference = rms(np.where(a == b, 0.0, a.astype(np.float64) - b.astype(np.float64)))
    if difference == 0.0:
        return 0.0
    size = rms(b) if scale is None else scale
    if not math.isfinite(difference) or not math.isfinite(size):
        same = np.array_equal(np.isfinite(a), np.isfinite(b))
        return 0.0 if same and not math.isfinite(size) else math.inf
    return difference / size if size > 0 else math.inf


def figure(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "without bound"
