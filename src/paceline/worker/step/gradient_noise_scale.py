"""The gradient noise scale: the batch size beyond which larger batches, on more workers, stop paying.

Gradients of small parts of a batch are longer than their mean, because of their noise. For a part of b samples the
expected squared norm is |G|^2 + tr(S) / b, where G is the gradient without noise, and S the covariance of one sample's.
Two sizes give both (McCandlish et al. 2018, "An empirical model of large-batch training", appendix A.1). Here the parts
are those of the replicas, weighted as in the mean, and the mean itself. Each step's two estimates are unbiased and
noisy, so both are smoothed before their ratio is taken: B = tr(S) / |G|^2. With batches of that size training takes
twice the least number of steps, and twice the least number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.sync.allreduce.replica_norms import ReplicaNorm

__all__ = ["GradientNoiseScale", "estimates"]

SMOOTHING = 0.99  # the weight that an estimate keeps from one step to the next
LEAST_STEPS = 10  # before these no value is reported


class GradientNoiseScale:
    """Follows the noise scale over the steps that are taken."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0
        self._num_steps = 0

    def add(
        self, parts: Sequence[ReplicaNorm], *, square: float | None, scale: float, weight: float, num_samples: int
    ) -> None:
        """Add a step: see `estimates`. Where its parts were not measured, nothing changes."""
        if square is None:
            return
        found = estimates(parts, square=square, scale=scale, weight=weight, num_samples=num_samples)
        if found is None or not all(map(math.isfinite, found)):
            return
        self._signal = SMOOTHING * self._signal + (1 - SMOOTHING) * found[0]
        self._noise = SMOOTHING * self._noise + (1 - SMOOTHING) * found[1]
        self._num_steps += 1

    @property
    def samples(self) -> float | None:
        """The noise scale; None: not known yet, or too large to be estimated."""
        if self._num_steps < LEAST_STEPS or self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal


def estimates(
    parts: Sequence[ReplicaNorm], *, square: float, scale: float, weight: float, num_samples: int
) -> tuple[float, float] | None:
    """Return estimates of |G|^2 and of tr(S) for single samples; None where no part is smaller than the batch.

    `square`: of the norm of the mean gradient, over losses that weigh `weight` and stand for `num_samples`. Gradients
    of parts were multiplied by `scale` when they had been summed. So the mean gradient of a part of weight w is
    `scale * weight / w` times the measured one. In the mean of their squares parts count by their weights.
    """
    some = [part for part in parts if part.weight > 0]
    in_parts = sum(part.weight for part in some)
    size = in_parts * num_samples / (len(some) * weight) if some and weight > 0 else num_samples  # of the mean part
    if size > 0.999 * num_samples:
        return None
    mean = (scale * weight) ** 2 / in_parts * sum(part.square / part.weight for part in some)
    noise = (mean - square) / (1 / size - 1 / num_samples)
    return (num_samples * square - size * mean) / (num_samples - size), noise
