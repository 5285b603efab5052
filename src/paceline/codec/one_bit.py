"""Send the sign of each number, and the mean magnitude of each block.

The scaled sign, as in Karimireddy et al. 2019, "Error feedback fixes SignSGD": without the feedback it is biased and
does not converge. Blocks of 1,024 numbers keep a layer with large gradients from drowning the ones beside it.

Bytes: 132 for 1,024 numbers of fp32, one in 31.
"""

from __future__ import annotations

from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds
from paceline.codec.byte_packing import bits_of, rows_of_bytes, scales_in, signs_in
from paceline.codec.quantized_sum import quantized_sum

__all__ = ["OneBitCodec"]


class OneBitCodec(Codec):
    """One bit for each number, eight to a byte, and a scale in fp32 for each block."""

    num_rounds = 2
    length, bits = 1024, 1

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        return quantized_sum(flat, self, replica)

    def encode(self, blocks: Tensor, counts: Tensor, seed: int) -> Tensor:
        scales = blocks.abs().sum(1, keepdim=True).div_(counts[:, None].clamp_min(1))
        return rows_of_bytes(scales, bits_of((blocks >= 0).view(-1)).view(len(blocks), -1))

    def decode(self, coded: Tensor) -> Tensor:
        scales, rest = scales_in(coded)
        return signs_in(rest.reshape(-1)).view(len(coded), -1).mul_(scales)
