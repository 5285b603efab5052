"""`Mixture`: several datasets with `len` and `[]` as one, of which each step takes samples in given proportions."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from typing import Any

from paceline.schedule.mixture_order import MixtureOrder

__all__ = ["Mixture"]


class Mixture:
    """Datasets that are mixed by weight, each in epochs of its own.

    `datasets` maps names to datasets with `len()` and `[]`. `weights` are proportions, of any sum; by default they are
    the datasets' sizes. With a `temperature` t above 1 each weight becomes its t-th root, so that small datasets come
    more often. `size` is the number of samples in an epoch of the mixture, by default that of all datasets together.

    Which dataset a position takes its sample of depends on seed and position alone: it is the same on any number of
    workers, and after a resume. Shares are exact over each 1,024 samples, to one sample. A dataset begins its next
    epoch, in another order, when its samples are used up, in the middle of an epoch of the mixture too.

    Raises TypeError for a dataset without `len()` and `[]`, and ValueError for an empty one, for other names in
    `weights`, and for numbers that are not above 0. Pass it to `worker.batches`.

    Example::

        mixture = paceline.Mixture({"web": range(900), "code": range(100)}, weights={"web": 3, "code": 1})
        assert len(mixture) == 1000 and mixture.shares["code"] == 0.25
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        size: int | None = None,
    ) -> None:
        for name, dataset in datasets.items():
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise TypeError(
                    f"Mixture: {name!r} is a {type(dataset).__name__} without len() and []: a mixture takes samples by "
                    "their numbers. Streams are mixed by paceline.StreamMixture"
                )
        self.datasets = dict(datasets)
        sizes = {name: len(dataset) for name, dataset in self.datasets.items()}
        if not sizes or min(sizes.values()) == 0:
            raise ValueError(f"Mixture: datasets of {sizes} samples; give at least one, and none that is empty")
        given = dict(sizes) if weights is None else dict(weights)
        if given.keys() != sizes.keys():
            raise ValueError(f"Mixture: weights for {sorted(given)}, and datasets {sorted(sizes)}: give one for each")
        numbers = {**given, "temperature": temperature, "size": 1 if size is None else size}
        wrong = [f"{name}={value}" for name, value in numbers.items() if not (math.isfinite(value) and value > 0)]
        if wrong:
            raise ValueError(f"Mixture: {', '.join(wrong)}: each must be a finite number above 0")
        roots = {name: given[name] ** (1 / temperature) for name in sizes}
        self.shares = {name: root / sum(roots.values()) for name, root in roots.items()}
        self._stops = list(itertools.accumulate(sizes.values()))
        self.order = MixtureOrder(sizes, self.shares, num_samples=self._stops[-1] if size is None else size)

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._stops, index)
        before = self._stops[number - 1] if number else 0
        return list(self.datasets.values())[number][index - before]
