"""Rounds fp32 tensors to bf16 at random, so that the expected value is the number itself.

A running average with decay 0.999 changes by less than half a step of bf16, and rounded to nearest it stands still.
Rounded up with the probability of the part that is cut off, it follows (Gupta et al., "Deep Learning with Limited
Numerical Precision", 2015). The 16 random bits of a number are a hash of a key and of its index in the whole tensor: so
any worker that has the number rounds it in the same way, whatever part of the tensor it holds.

The hash is a finalizer of 32 bits with two multiplications ("lowbias32" of Wellons' hash-prospector); two tensors of
one shape share it, the one taking its lower half and the other its upper half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ElementIndex", "random_bits", "round_stochastically", "rounding_key"]

PIECE = 1 << 20  # numbers that are rounded at a time: temporaries fit a processor's cache
HALF_BITS = 16


class ElementIndex:
    """The indices, in the whole tensor, of the numbers of a part of it."""

    def __init__(self, whole: Sequence[int], places: Sequence[Tensor]) -> None:
        """`places[d]`: the places along dim d that the part has, on its device."""
        self.shape = tuple(len(one) for one in places)
        strides = [1]
        for size in reversed(whole[1:]):
            strides.insert(0, strides[0] * size)
        self._terms = [(one * stride).to(torch.int32) for one, stride in zip(places, strides, strict=True)]

    def rows(self, first: int, stop: int) -> Tensor:
        """The indices of rows [first, stop) of the part, modulo 2**32."""
        found = self._terms[0][first:stop]
        for term in self._terms[1:]:
            found = found.unsqueeze(-1) + term
        return found


def rounding_key(*parts: object) -> tuple[int, int]:
    """Return two numbers of 32 bits for a seed, a step and names; the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest[:4], "little")), _signed(int.from_bytes(digest[4:], "little"))


def random_bits(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Return 32 random bits for each index, as int32; a pure function of index and key."""
    bits = index ^ key[0]
    for shift, factor in ((16, 0x7FEB352D), (15, _signed(0x846CA68B))):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)
        bits *= factor
    bits ^= (bits >> 16) & 0xFFFF
    bits += key[1]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x7FEB352D
    return bits.bitwise_xor_((bits >> 15) & 0x1FFFF)


@torch.no_grad()
def round_stochastically(tensors: Sequence[Tensor], index: ElementIndex, key: tuple[int, int]) -> list[Tensor]:
    """Return fp32 tensors of one shape in bf16, each number rounded up or down at random. What is not finite stays."""
    out = [torch.empty_like(one, dtype=torch.bfloat16, memory_format=torch.contiguous_format) for one in tensors]
    width = max(1, tensors[0][:1].numel())
    step = max(1, PIECE // width)
    for first in range(0, len(tensors[0]), step):
        stop = min(first + step, len(tensors[0]))
        places, drawn = index.rows(first, stop), out[0]
        for number, (one, target) in enumerate(zip(tensors, out, strict=True)):
            is_lower = number % 2 == 0
            drawn = random_bits(places, (key[0] + number // 2, key[1])) if is_lower else drawn
            target[first:stop] = _rounded(one[first:stop], (drawn if is_lower else drawn >> HALF_BITS) & 0xFFFF)
    return out


def _rounded(value: Tensor, noise: Tensor) -> Tensor:
    """Add noise below the last bit that bf16 keeps, and cut off what is behind it."""
    bits = value.contiguous().view(torch.int32)
    lifted = (bits + noise).bitwise_and_(-(1 << HALF_BITS)).view(torch.float32)
    return torch.where(torch.isfinite(value), lifted, value).to(torch.bfloat16)


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
