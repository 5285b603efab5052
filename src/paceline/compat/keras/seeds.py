"""Random layers (Dropout, GaussianNoise, augmentation): their seeds are those of the micro-batch.

Keras keeps a seed and a count of draws for each layer, and each forward counts up. So the numbers of a forward would
depend on how many came before it in the same process, and a step's micro-batches, which all begin from the step's
state, would draw the same ones. Paceline seeds torch's global generator for each micro-batch by the plan's seed, the
step and the micro-batch's number. A layer's seed is drawn from that generator here: it differs between micro-batches,
layers and steps, and is the same under every plan, wherever the micro-batch runs. The layer's count stays as it is.

So do draws without a seed (`keras.random.normal(shape)`), which a layer may make. A generator of the program's own,
which no layer of a prepared model has, counts as Keras has it count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.compat.keras.the_keras import keras

__all__ = ["LayerSeeds", "draw_from_micro_batch"]

LARGEST = 2**31 - 1  # of the 32-bit integers in which Keras keeps seeds
COUNTED = keras.random.SeedGenerator.next  # Keras' own


class LayerSeeds(keras.random.SeedGenerator):
    """A seed generator that a layer of a prepared model has."""

    def next(self, ordered: bool = True) -> Tensor:
        """Return what a forward's random numbers are seeded with."""
        return _drawn(self)


def draw_from_micro_batch(generators: Iterable[Any]) -> None:
    """Have layers' generators draw from torch's global generator from now on, and all draws without a seed."""
    for one in generators:
        if type(one) is keras.random.SeedGenerator:
            one.__class__ = LayerSeeds
    keras.random.SeedGenerator.next = _next


def _next(generator: Any, ordered: bool = True) -> Tensor:
    """In the place of Keras' own, which is asked for unordered numbers where a draw has no seed."""
    return COUNTED(generator) if ordered else _drawn(generator)


def _drawn(generator: Any) -> Tensor:
    """Return the two numbers that a generator is seeded with: the layer's own seed, and one of the micro-batch."""
    state = generator.state.value.detach()
    drawn = torch.randint(0, LARGEST, (1,), dtype=torch.int64)
    return torch.cat([state[:1], drawn.to(device=state.device, dtype=state.dtype)])
