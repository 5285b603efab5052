"""Has a model's units draw the random numbers in training that they draw under pipeline stages.

There a unit draws from (seed, step, micro-batch, number of the call), wherever it runs. One process draws from one
stream instead, so dropout is another one. Only a reference of `paceline parity`, to which a plan with stages is
compared, draws by unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from paceline.parallel.model_units import ModelUnit, find_units, seeded_units

__all__ = ["UnitDraws"]


class UnitDraws:
    """The units of the prepared models. `models()`: each with the names of the modules that the user made units."""

    def __init__(self, models: Callable[[], Iterable[tuple[nn.Module, tuple[str, ...]]]]) -> None:
        self._models = models
        self._units: dict[nn.Module, list[ModelUnit]] = {}
        self._end_forward: Callable[[], None] | None = None

    @contextlib.contextmanager
    def of_micro(self, *seed: int) -> Iterator[None]:
        """While it lasts, forward and backward of a micro-batch draw by unit."""
        for model, named in self._models():
            if model not in self._units:
                self._units[model] = find_units(model, named=named)
        units = [unit for own in self._units.values() for unit in own]
        with seeded_units(units, *seed) as self._end_forward:
            yield
        self._end_forward = None

    def begin_backward(self) -> None:
        """The forward is over: units that are called now are recomputed."""
        if self._end_forward is not None:
            self._end_forward()
