"""Random state: each micro-batch has its own, seeded by its number alone, and code outside of the step keeps its own.

Covered: torch on the CPU and on the worker's device, Python's `random`, and numpy's global generator. Generators that
user code makes are not touched.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand  # numpy's type stubs lack the two functions in numpy.random

from paceline.schedule.sample_order import mix

__all__ = ["PreservedRandomState", "capture_random_state", "restore_random_state", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed every global generator from a hash of `numbers`."""
    seed = mix(*numbers)
    torch.random.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # numpy's global generator, because data sets use it


def capture_random_state() -> dict[str, Any]:
    """Return the state of every global generator, as tensors, numbers and tuples."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `capture_random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


class PreservedRandomState:
    """A `with` block that leaves every global generator as it was before; may be used again, but not nested.

    numpy's generator is exchanged, not copied, which is far cheaper; a normal number that it drew in advance is lost.
    """

    def __init__(self) -> None:
        self._spare = np.random.MT19937(0)

    def __enter__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._numpy = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._spare)

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
