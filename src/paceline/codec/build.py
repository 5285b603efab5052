"""From a Wire (what the user wrote) to a codec (what runs): one row each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.codec.base import Codec
from paceline.codec.cast import HALF, CastCodec
from paceline.codec.error_feedback import ErrorFeedback
from paceline.codec.int8 import Int8Codec
from paceline.codec.onebit import OneBitCodec
from paceline.codec.powersgd import PowerSGDCodec
from paceline.codec.raw import RawCodec
from paceline.codec.sparse import SparseCodec
from paceline.codec.topk import TopKCodec
from paceline.plan import Cast, Int8, OneBit, PowerSGD, Raw, Sparse, TopK, Wire

__all__ = ["build_codec"]


def build_codec(wire: Wire, *, shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Codec:
    """Return a new codec for one bucket, of parameters with so many rows and columns, one behind the other.

    Complex numbers are cast or travel as they are: the other codecs know of real ones only.
    """
    codec = _plain_codec(wire, shapes, dtype)
    if dtype.is_complex or not wire.feedback:
        return codec
    return ErrorFeedback(codec, sizes=[math.prod(shape) for shape in shapes])


def _plain_codec(wire: Wire, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Codec:
    match wire:
        case Cast(dtype=half):
            return CastCodec(HALF[half])
        case _ if dtype.is_complex:
            return RawCodec()
        case Raw():
            return RawCodec()
        case Int8():
            return Int8Codec()
        case OneBit():
            return OneBitCodec()
        case TopK(ratio=ratio):
            return TopKCodec(ratio)
        case PowerSGD(rank=rank):
            return PowerSGDCodec(rank, shapes=shapes)
        case Sparse():
            return SparseCodec(shapes=shapes)
