"""Gradients as they are, without a codec: what DDP sends."""

from __future__ import annotations

from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds, SumPayload

__all__ = ["RawCodec"]


class RawCodec(Codec):
    """Sends gradients as they are: the buffer itself is summed in place. Bytes on the wire: those of the gradient."""

    exact = True

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        total = yield SumPayload(flat)
        if total is not flat:
            flat.copy_(total)
        return None
