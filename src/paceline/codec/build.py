"""From a Wire (what the user wrote) to a codec (what runs): one row each."""

from __future__ import annotations

import torch

from paceline.codec.base import Codec
from paceline.codec.cast import CastCodec
from paceline.codec.raw import RawCodec
from paceline.plan import Cast, Raw

__all__ = ["build_codec"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_codec(wire: Raw | Cast) -> Codec:
    """Return a new codec for one bucket (codecs may keep state per bucket)."""
    match wire:
        case Raw():
            return RawCodec()
        case Cast(dtype=dtype):
            return CastCodec(HALF[dtype])
