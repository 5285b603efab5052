"""In which types a model computes.

fp32: as written. bf16: weights and optimizer stay fp32, matrix work runs in bf16 by autocast. fp64: everything in
double precision, the reference for parity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["computing", "convert", "input_dtype"]


def convert(model: nn.Module, precision: str) -> None:
    """Change the model's own types where the precision asks for it, in place."""
    if precision == "fp64":
        model.double()


def input_dtype(precision: str) -> torch.dtype | None:
    """The type that floating inputs are converted to, or None."""
    return torch.float64 if precision == "fp64" else None


@contextlib.contextmanager
def computing(precision: str, device: torch.device) -> Iterator[None]:
    """What surrounds each forward: autocast for bf16, a default type of float64 for fp64."""
    if precision == "bf16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    elif precision == "fp64":
        former = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(former)
    else:
        yield
