"""Gradients in 8 bits: each number as one byte, with a scale for each block.

Blocks of 256 numbers are divided by a scale, such that the largest is 127, and rounded stochastically, so the expected
value is exact (Alistarh et al. 2017, "QSGD"). Bytes: 260 for 256 numbers of fp32, 0.254.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds
from paceline.codec.quantized_sum import quantized_sum, rows_of_bytes, scales_in
from paceline.schedule.payload_sizes import INT8

__all__ = ["Int8Codec"]

LARGEST = 127
LEAST = torch.finfo(torch.float32).tiny  # a scale: of nothing but zeros it would be 0


class Int8Codec(Codec):
    """One byte for each number, and a scale in fp32 for each block. A block with a number that is not finite is not
    finite anywhere."""

    num_rounds = 2
    length, bits = INT8

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        return quantized_sum(flat, self, replica)

    def encode(self, blocks: Tensor, counts: Tensor, seed: int) -> Tensor:
        scales = blocks.abs().amax(1, keepdim=True).div_(LARGEST)
        generator = torch.Generator(blocks.device).manual_seed(seed)
        noise = torch.rand(blocks.shape, generator=generator, device=blocks.device)
        levels = noise.add_(blocks / scales.clamp_min(LEAST)).floor_().clamp_(-LARGEST, LARGEST)
        return rows_of_bytes(scales, levels.nan_to_num_(0.0).to(torch.int8))  # the scale says what is not finite

    def decode(self, coded: Tensor) -> Tensor:
        scales, rest = scales_in(coded)
        return rest.view(torch.int8).float().mul_(scales)
