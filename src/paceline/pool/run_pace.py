"""The pace of a run of a pool on so many replicas, and the batch that it has there, where its user lets it grow.

A step of M samples brings as much as B + M0 samples of B + M would at the batch M0, where B is the gradient noise scale
(McCandlish et al., arXiv 1812.06162): training to the same loss takes a number of samples that grows with B + M. So a
second on n replicas is worth M / step_s(n, M) * (B + M0) / (B + M) samples at the batch M0. That number is the
*goodput*; the term was made by Qiao et al., Pollux, OSDI 2021. A step takes longer with a larger batch by what its
micro-batches take: data, forward and backward. What is exchanged and updated stays.
"""

from __future__ import annotations

import dataclasses

from paceline.pool.batch_growth import BatchGrowth
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import RunEntry
from paceline.pool.throughput import Throughput

__all__ = ["RunPace"]

LEAST_GAIN = 1.1  # the run saves and starts again for another batch, so that has to bring so many times as much


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunPace:
    """The pace of one run: by its throughput alone, or with the best batch where `growth` lets this change.

    `throughput` and `samples_s`, the worker-seconds of a step's micro-batches, are of the least batch. `noise_scale` is
    in samples, None as long as it is unknown; then the batch stays at `batch`, as far as it may.
    """

    throughput: Throughput
    fewest: int
    samples_s: float = 0.0
    growth: BatchGrowth | None = None
    noise_scale: float | None = None
    batch: int = 0

    @classmethod
    def of(cls, run: PoolRun, entry: RunEntry) -> RunPace:
        """The pace of a run, from what it has measured so far."""
        return cls(
            throughput=Throughput(entry.measured),
            fewest=run.least,
            samples_s=entry.samples_s,
            growth=run.growth,
            noise_scale=entry.noise_scale,
            batch=0 if run.growth is None else entry.batch or run.growth.least,
        )

    @property
    def scale(self) -> float:
        """The present batch in multiples of the least one."""
        return 1.0 if self.growth is None else self.batch / self.growth.least

    def pace(self, replicas: int) -> float:
        """How much faster than on one replica with the least batch."""
        if replicas < 1:
            return 0.0
        if self.growth is None:
            return self.throughput.speedup(replicas)
        return self._samples_per_s(replicas, self.best_batch(replicas)) / self._samples_per_s(1, self.growth.least)

    def best_batch(self, replicas: int) -> int:
        """The batch on so many replicas: the present one, unless another brings at least a tenth more; 0 where it is
        the plan's.
        """
        if self.growth is None:
            return 0
        sizes = self.growth.sizes(replicas, fewest=self.fewest)
        stays = max((size for size in sizes if size <= self.batch), default=sizes[0])
        if self.noise_scale is None:
            return stays
        best = max(sizes, key=lambda size: (self._samples_per_s(replicas, size), -size))
        gain = self._samples_per_s(replicas, best) / self._samples_per_s(replicas, stays)
        return best if gain >= LEAST_GAIN else stays

    def gain_text(self, name: str, replicas: int, before: int) -> str:
        """Why the batch changes from `before`: one sentence."""
        after = self.best_batch(replicas)
        on = f"{replicas} {'replica' if replicas == 1 else 'replicas'}"
        text = f"{name} goes from batches of {before:,} samples to {after:,} on {on}"
        if self.noise_scale is None or self.growth is None:
            return f"{text}: with fewer replicas its batch may not be larger"
        gain = self._samples_per_s(replicas, after) / self._samples_per_s(replicas, before)
        if gain < 1:
            return f"{text}: with fewer replicas its batch may not be larger"
        return (
            f"{text}: at a gradient noise scale of about {self.noise_scale:,.0f} samples, a second brings {gain:.2g} "
            "times as much"
        )

    def _samples_per_s(self, replicas: int, batch: int) -> float:
        """In samples of the least batch."""
        if self.growth is None:
            return 0.0
        efficiency = 1.0 if self.noise_scale is None else self.growth.efficiency(batch, self.noise_scale)
        longer_s = (batch / self.growth.least - 1) * self.samples_s / replicas
        return batch * efficiency / (self.throughput.step_s(replicas) + longer_s)
