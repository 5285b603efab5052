"""How payloads are made of bytes: tensors one behind the other, signs as bits, and blocks with a scale each."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_bytes", "bits_of", "rows_of_bytes", "scales_in", "signs_in"]

GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: they become the bits of the highest byte


def as_bytes(*parts: Tensor) -> Tensor:
    """Return tensors of any types as one row of bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def rows_of_bytes(scales: Tensor, values: Tensor) -> Tensor:
    """Return for each block its scale (b, 1), in fp32, and then its values (b, some) of one byte each."""
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], dim=1)


def scales_in(coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `rows_of_bytes` was given, the values as bytes."""
    return coded[:, :4].contiguous().view(torch.float32), coded[:, 4:].contiguous()


def bits_of(positive: Tensor) -> Tensor:
    """Pack truth values, 1-D and a multiple of eight long, into bytes: the first one is the lowest bit."""
    eights = positive.view(torch.uint8).view(torch.int64)
    return (eights * GATHER_BITS).bitwise_right_shift(56).to(torch.uint8)


def signs_in(packed: Tensor) -> Tensor:
    """Return the signs that `bits_of` has packed: 1.0 where the value was true, else -1.0, 1-D."""
    numbers = torch.arange(256, device=packed.device)[:, None]
    shifts = torch.arange(8, device=packed.device)
    table = ((numbers >> shifts) & 1).float().mul_(2).sub_(1)
    return table.index_select(0, packed.int()).view(-1)
