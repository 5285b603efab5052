"""Gradients in 1 bit: the sign of each number, and the mean magnitude of each block.

This is the scaled sign of Karimireddy et al. 2019, "Error feedback fixes SignSGD". Without error feedback it is biased
and does not converge. Blocks of 1,024 numbers keep a layer with large gradients from dominating its neighbors.
Bytes: 132 for 1,024 numbers of fp32, one in 31.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds
from paceline.codec.quantized_sum import quantized_sum, rows_of_bytes, scales_in
from paceline.schedule.payload_sizes import ONE_BIT

__all__ = ["OneBitCodec", "bits_of", "signs_in"]

GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: they become the bits of the highest byte


class OneBitCodec(Codec):
    """One bit for each number, eight to a byte, and a scale in fp32 for each block."""

    num_rounds = 2
    length, bits = ONE_BIT

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        return quantized_sum(flat, self, replica)

    def encode(self, blocks: Tensor, counts: Tensor, seed: int) -> Tensor:
        scales = blocks.abs().sum(1, keepdim=True).div_(counts[:, None].clamp_min(1))
        return rows_of_bytes(scales, bits_of((blocks >= 0).view(-1)).view(len(blocks), -1))

    def decode(self, coded: Tensor) -> Tensor:
        scales, rest = scales_in(coded)
        return signs_in(rest.reshape(-1)).view(len(coded), -1).mul_(scales)


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
