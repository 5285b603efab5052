"""In which precision something is tried on random weights.

Double precision tells a wrong rule from rounding at once. It takes twice the memory of single precision and more than
twice the time, so something large is tried in single precision first.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["is_large", "types_to_try"]

MOST_AT_FIRST = 1 << 18  # numbers of the largest parameter that are tried in double precision at once


def is_large(module: nn.Module, most: int) -> bool:
    """Whether a parameter has more numbers than `most`."""
    return max((one.numel() for one in module.parameters()), default=0) > most


def types_to_try(module: nn.Module) -> tuple[torch.dtype, torch.dtype]:
    """Return in which types to try, in turn: where one agrees or double precision does not, the other is left out."""
    is_first_single = is_large(module, MOST_AT_FIRST)
    return (torch.float32, torch.float64) if is_first_single else (torch.float64, torch.float32)
