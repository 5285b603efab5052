"""Gradients in 16 bits (bf16 or fp16), as with DDP's bf16 and fp16 communication hooks.

Each replica rounds its numbers to nearest, and the sum itself is formed in that type. bf16 keeps the range of fp32 with
8 bits of precision. fp16 has 11 bits but overflows above 65,504; the check for non-finite gradients then skips the
step. Half the bytes of fp32. The rounding error has no preferred sign and is far below the noise of a gradient, so it
is remembered only on demand (`Cast(feedback=True)`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds, SumPayload

__all__ = ["HALF", "CastCodec"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # as a plan names them


class CastCodec(Codec):
    """Rounds to `dtype` (bfloat16 or float16) for sending; of complex numbers both parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        numbers = torch.view_as_real(flat) if flat.is_complex() else flat
        rounded = numbers.to(self.dtype)
        own = rounded.to(flat.dtype) if not flat.is_complex() else None  # the payload is overwritten by the sum
        total = yield SumPayload(rounded)
        numbers.copy_(total)
        return own
