"""Find the constants of the cost model, and one factor for each software, from rows.

Least squares on the logarithm of measured over predicted seconds, robust (soft l1), so that a misprinted row moves
little. Each source has a factor, drawn towards 1: with n rows it takes n / (n + 1/2) of their middle. Sources of many
rows count as forty. Constants are drawn towards their first guesses, so that what the rows do not tell stays plausible;
the strength of that was chosen by leaving out sources.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from paceline.planner.case import Case
from paceline.planner.constants import CONSTANTS, Calibration, Constants
from paceline.planner.predict import Workload
from tables.rows import Reading, measured_s, read_row

__all__ = ["Sample", "fit", "folds", "middle", "samples", "software_factors", "spread"]

GUESS_WEIGHT, FACTOR_WEIGHT, MOST_ROWS = 0.7, 0.5, 40
SOFT = 0.08  # residuals above it count less than by their square
BAND = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A row whose seconds are known."""

    reading: Reading
    workload: Workload
    seconds: float

    @property
    def title(self) -> str:
        return self.reading.title

    @property
    def case(self) -> Case:
        return self.reading.case

    def log_error(self, constants: Constants, factor: float = 1.0) -> float:
        """The logarithm of predicted over measured."""
        return math.log(self.workload.predict(constants, factor).step_s / self.seconds)


def samples(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Return the rows that have a measured time, in their order."""
    found: list[Sample] = []
    for row in rows:
        reading = read_row(row)
        seconds = measured_s(row, reading.case)
        if seconds:
            found.append(Sample(reading, Workload(reading.case), seconds))
    return found


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half."""
    ordered, n = sorted(values), len(values)
    kept = ordered if n < 3 else ordered[n // 4 : max(n // 4 + 1, n - n // 4)]
    return sum(kept) / len(kept)


def spread(errors: Iterable[float], share: float = BAND) -> float:
    """The half width that holds this share of the errors."""
    found = [abs(error) for error in errors]
    return float(np.quantile(found, share)) if found else math.log(2)


def _constants(x: Any) -> Constants:
    values = {
        constant.name: min(max(math.exp(value), constant.low), constant.high)
        for constant, value in zip(CONSTANTS, x, strict=True)
    }
    return Constants(**values)


def _by_title(found: Sequence[Sample]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(found):
        groups.setdefault(sample.title, []).append(index)
    return groups


def fit(found: Sequence[Sample]) -> Constants:
    """Return the constants that explain these rows best."""
    groups = _by_title(found)
    guess = np.log([constant.guess for constant in CONSTANTS])
    low, high = (np.log([getattr(constant, end) for constant in CONSTANTS]) for end in ("low", "high"))
    width = (high - low) / 2
    weights = np.ones(len(found))
    for indices in groups.values():
        weights[indices] = math.sqrt(min(1.0, MOST_ROWS / len(indices)))

    def residuals(x: Any) -> Any:
        constants = _constants(x)
        raw = np.array([sample.log_error(constants) for sample in found])
        drawn: list[float] = []
        for indices in groups.values():
            offset, n = middle(raw[indices].tolist()), len(indices)
            raw[indices] -= offset * n / (n + 0.5)
            drawn.append(FACTOR_WEIGHT * offset * math.sqrt(min(n, 8)))
        return np.concatenate([raw * weights, drawn, (x - guess) / width * GUESS_WEIGHT])

    start = np.clip(guess, low + 1e-9, high - 1e-9)
    best = least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT, diff_step=1e-4, max_nfev=40, ftol=1e-5
    )
    return _constants(best.x)


def software_factors(found: Sequence[Sample], constants: Constants) -> dict[str, float]:
    """Return measured over predicted of each source."""
    factors: dict[str, float] = {}
    for title, indices in sorted(_by_title(found).items()):
        offset = middle([found[index].log_error(constants) for index in indices])
        factors[title] = math.exp(-offset * len(indices) / (len(indices) + 0.5))
    return factors


def folds(found: Sequence[Sample], number: int = 5) -> list[tuple[list[Sample], list[Sample]]]:
    """Return (to fit, to try) several times, so that each row is tried once; the same each time."""
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    parts = [set(order[start::number]) for start in range(number)]
    return [
        ([one for index, one in enumerate(found) if index not in part], [found[index] for index in sorted(part)])
        for part in parts
    ]


def errors_of_known(found: Sequence[Sample]) -> list[tuple[Sample, float]]:
    """Return the error of each row, by a fit to the other rows with a factor of its source."""
    errors: list[tuple[Sample, float]] = []
    for kept, tried in folds(found):
        constants = fit(kept)
        factors = software_factors(kept, constants)
        errors += [(one, one.log_error(constants, factors.get(one.title, 1.0))) for one in tried]
    return errors


def errors_of_unknown(found: Sequence[Sample], untitled: Sequence[Sample]) -> list[tuple[Sample, float]]:
    """Return the error of each row, by a fit to the rows of all other sources, without a factor.

    `untitled`: the same rows read without their title, so that what is known of the software does not help either.
    """
    errors: list[tuple[Sample, float]] = []
    for title in sorted({one.title for one in found}):
        constants = fit([one for one in found if one.title != title])
        same = [index for index, one in enumerate(found) if one.title == title]
        errors += [(found[index], untitled[index].log_error(constants)) for index in same]
    return errors


def calibrate(found: Sequence[Sample]) -> Calibration:
    """Return constants and factors, without spreads."""
    constants = fit(found)
    return Calibration(constants=constants, factors=software_factors(found, constants))
