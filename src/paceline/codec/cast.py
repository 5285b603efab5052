"""Send gradients in sixteen bits.

Each replica rounds its contribution to nearest once before it is summed; the sum itself is formed in the same type by
whoever sums. bf16 keeps the range of fp32 with 8 bits of precision; fp16 has 11 bits but overflows above 65,504, which
the check for non-finite gradients then turns into a skipped step. Half the bytes of fp32.

An error of one part in 512 that has no preferred sign is far below the noise of a gradient, so what rounding leaves
behind is remembered only on demand (`Cast(feedback=True)`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds, SumPayload

__all__ = ["HALF", "CastCodec"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # as a plan names them


class CastCodec(Codec):
    """Round to `dtype` (bfloat16 or float16) on the way; of complex numbers both parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        numbers = torch.view_as_real(flat) if flat.is_complex() else flat
        rounded = numbers.to(self.dtype)
        own = rounded.to(flat.dtype) if not flat.is_complex() else None  # the payload is overwritten by the sum
        total = yield SumPayload(rounded)
        numbers.copy_(total)
        return own
