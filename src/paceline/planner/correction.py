"""Predictions corrected by what was measured on the same cluster."""

from __future__ import annotations

import dataclasses

from paceline.planner.memory import MemoryPrediction
from paceline.planner.predict import Prediction

__all__ = ["COMPUTE", "UNCORRECTED", "Correction"]

# Parts that grow with the seconds of compute: the pipeline's bubble, and waiting for the slowest, are made of it.
COMPUTE = ("products", "attention", "moves", "launches", "head", "recompute", "idle", "straggle")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """By what seconds of compute, of packing, of the optimizer and of communication are multiplied, and what is added
    to each step and to a worker's memory.

    `receipts`: from how many; `of`: whose they are, in words; `is_same`: of the same model on as many workers.
    """

    compute: float = 1.0
    packing: float = 1.0
    optimizer: float = 1.0
    communication: float = 1.0
    added_s: float = 0.0
    added_bytes: float = 0.0
    receipts: int = 0
    of: str = ""
    is_same: bool = False

    def of_part(self, name: str) -> float:
        """The factor of one part."""
        if name in COMPUTE:
            return self.compute
        if name == "packing":
            return self.packing
        return self.optimizer if name in ("optimizer", "offload") else self.communication

    def of_step(self, estimated: Prediction) -> Prediction:
        """Return the corrected prediction; utilisation and tokens per second follow the step."""
        if not self.receipts:
            return estimated
        parts = {name: value * self.of_part(name) for name, value in estimated.parts.items()}
        parts["other"] = self.added_s
        step_s = sum(parts.values())
        slower = step_s / estimated.step_s
        return dataclasses.replace(
            estimated,
            step_s=step_s,
            parts=parts,
            tokens_per_s=estimated.tokens_per_s / slower,
            mfu=estimated.mfu / slower,
        )

    def of_memory(self, estimated: MemoryPrediction) -> MemoryPrediction:
        """Return the corrected memory; what was measured beyond the prediction is the runtime's."""
        if not self.added_bytes:
            return estimated
        parts = dict(estimated.parts)
        parts["runtime"] = max(0.0, parts["runtime"] + self.added_bytes)
        return dataclasses.replace(estimated, peak=sum(parts.values()), parts=parts)


UNCORRECTED = Correction()
