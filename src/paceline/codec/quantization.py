"""Quantizing codecs, which send fewer bits for each number: casts to 16 bits, 8 bits, and 1 bit.

`CastCodec` rounds each replica's numbers to nearest, and the sum itself is formed in that type. bf16 keeps the range of
fp32 with 8 bits of precision. fp16 has 11 bits but overflows above 65,504; the check for non-finite gradients then
skips the step. Half the bytes of fp32. The rounding error has no preferred sign and is far below the noise of a
gradient, so it is remembered only on demand (`Cast(feedback=True)`).

`Int8Codec` divides blocks of 256 numbers by a scale, such that the largest is 127, and rounds stochastically, so the
expected value is exact (Alistarh et al. 2017, "QSGD"). Bytes: 260 for 256 numbers of fp32, 0.254.

`OneBitCodec` sends the sign of each number, and the mean magnitude of each block of 1,024 (Karimireddy et al. 2019,
"Error feedback fixes SignSGD"). Without error feedback it is biased and does not converge. Blocks keep a layer with
large gradients from dominating its neighbors. Bytes: 132 for 1,024 numbers of fp32, one in 31.

Quantized numbers cannot be summed in transit. Two replicas send each other all they have. With more replicas, each gets
its share of the blocks from all others, adds it up, and sends the quantized sum to all (Tang et al. 2021, "1-bit Adam",
section 5). The error of that second rounding counts as the error of the replica that owns the share. Bytes, with n
replicas: 2 (n-1)/n of the payload, as in an all-reduce without a codec.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, GatherPayload, Rounds, ScatterPayload, SumPayload
from paceline.schedule.sample_order import mix

__all__ = ["HALF", "BlockEncoding", "CastCodec", "Int8Codec", "OneBitCodec", "as_bytes", "bits_of", "signs_in"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # as a plan names them
LARGEST = 127
LEAST = torch.finfo(torch.float32).tiny  # a scale: of nothing but zeros it would be 0
LEAST_BLOCKS = 8  # for each replica: of fewer, a second round costs more than it spares
GATHER_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: they become the bits of the highest byte


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


class Int8Codec(Codec):
    """One byte for each number, and a scale in fp32 for each block. A block with a number that is not finite is not
    finite anywhere."""

    num_rounds = 2
    length, bits = 256, 8

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


class BlockEncoding(Protocol):
    """How blocks of equal length become bytes, and numbers again."""

    length: int  # of a block
    bits: int  # for each number

    def encode(self, blocks: Tensor, counts: Tensor, seed: int) -> Tensor:
        """Return blocks (b, length) as bytes (b, some); only the first `counts[k]` numbers of block k are there."""
        ...

    def decode(self, coded: Tensor) -> Tensor:
        """Return the blocks that such bytes stand for."""
        ...


def quantized_sum(flat: Tensor, coarse: BlockEncoding, replica: CodecContext) -> Rounds:
    """The rounds of `Codec.exchange`: one between two replicas, and of small tensors; otherwise two."""
    size, count = flat.numel(), replica.count
    num_blocks = -(-size // coarse.length)
    is_shared = count > 2 and num_blocks >= LEAST_BLOCKS * count
    each = -(-num_blocks // count) if is_shared else num_blocks
    num_padded = each * count if is_shared else each
    blocks = F.pad(flat.float(), (0, num_padded * coarse.length - size)).view(num_padded, coarse.length)
    starts = torch.arange(0, num_padded * coarse.length, coarse.length, device=flat.device)
    counts = (size - starts).clamp_(0, coarse.length)
    coded = coarse.encode(blocks, counts, replica.seed)
    own = coarse.decode(coded)
    if not is_shared:
        spare = (blocks.numel() - size) * coarse.bits // 8  # bytes of nothing, at the end
        rows = yield GatherPayload(coded.view(-1)[: coded.numel() - spare])
        total = torch.zeros_like(blocks)
        for row in rows:
            total += coarse.decode(F.pad(row, (0, spare)).view_as(coded))
        flat.copy_(total.view(-1)[:size])
        return own.view(-1)[:size]
    rows = yield ScatterPayload(coded.view(count, -1))
    mine = slice(replica.index * each, (replica.index + 1) * each)
    share = torch.zeros_like(blocks[mine])
    for row in rows:
        share += coarse.decode(row.view(each, -1))
    share *= torch.arange(coarse.length, device=flat.device) < counts[mine, None]
    again = coarse.encode(share, counts[mine], mix(replica.seed, 1) >> 1)
    own[mine] -= share - coarse.decode(again)
    rows = yield GatherPayload(again.view(-1))
    flat.copy_(coarse.decode(rows.view(num_padded, -1)).view(-1)[:size])
    return own.view(-1)[:size]


def as_bytes(*parts: Tensor) -> Tensor:
    """Return tensors of any types as one row of bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def rows_of_bytes(scales: Tensor, values: Tensor) -> Tensor:
    """Return for each block its scale (b, 1), in fp32, and then its values (b, some) of one byte each."""
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], dim=1)


def scales_in(coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `rows_of_bytes` was given, the values as bytes."""
    return coded[:, :4].contiguous().view(torch.float32), coded[:, 4:].contiguous()


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
