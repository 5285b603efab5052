"""How wide the 80 % band of a predicted step is."""

from __future__ import annotations

from paceline.planner.case import Case
from paceline.planner.constants import Calibration
from paceline.planner.correction import Correction

__all__ = ["step_half_width"]

# On CPUs, of the logarithm of predicted over measured seconds (docs/reference/benchmarks.md): before the model has run
# there, when only the machine was measured; and after runs of the same model on as many workers.
CPU_UNKNOWN, CPU_RECEIPTS = 0.75, 0.21
DEFAULT = 0.25


def step_half_width(case: Case, calibration: Calibration, correction: Correction) -> float:
    """Return half the width of a step's band, of the logarithm.

    For accelerators it is that of unknown software in the published rows that were not in the fit, or, after runs of
    the same model on as many workers, that of predictions from one receipt.
    """
    if case.cluster.device.is_synchronous:
        return CPU_RECEIPTS if correction.is_same else CPU_UNKNOWN
    return calibration.spreads.get("receipt" if correction.is_same else "none", DEFAULT)
