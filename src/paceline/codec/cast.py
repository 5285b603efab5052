"""Send gradients in sixteen bits.

Each replica rounds its contribution to nearest once before it is summed; the sum itself is formed in the same type by
the back end. bf16 keeps the range of fp32 with 8 bits of precision; fp16 has 11 bits but overflows above 65,504, which
the check for non-finite gradients then turns into a skipped step. Half the bytes of fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Rounds

__all__ = ["CastCodec"]


class CastCodec:
    """Round to `dtype` (bfloat16 or float16) on the way; of complex numbers both parts."""

    additive = True
    elementwise = True
    exact = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def exchange(self, flat: Tensor) -> Rounds:
        numbers = torch.view_as_real(flat) if flat.is_complex() else flat
        total = yield numbers.to(self.dtype)
        numbers.copy_(total)
