"""Random state: each micro-batch has its own, seeded by numbers alone, and the code around the step never notices.

Covered: torch on the CPU and on the worker's device, Python's `random`, and numpy's global generator. Generators that
user code makes for itself are its own business.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.schedule.order import mix

__all__ = ["aside", "capture", "restore", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed every global generator from a hash of `numbers`."""
    seed = mix(*numbers)
    torch.random.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # numpy's global generator, because data sets use it


def capture() -> dict[str, Any]:
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


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leave every global generator as it was before.

    numpy's generator is exchanged, not copied, which is far cheaper; a normal number that it drew in advance is lost.
    """
    torch_state, python_state, numpy_generator = torch.get_rng_state(), random.getstate(), np.random.get_bit_generator()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    np.random.set_bit_generator(np.random.MT19937(0))
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_bit_generator(numpy_generator)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
