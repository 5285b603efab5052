"""The sum of quantized gradients, for `int8` and `onebit`: blocks of numbers with a few bits each, and a scale.

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

from paceline.codec.base import CodecContext, GatherPayload, Rounds, ScatterPayload
from paceline.schedule.payload_sizes import block_split, coded_bytes
from paceline.schedule.sample_order import mix

__all__ = ["BlockEncoding", "quantized_sum", "rows_of_bytes", "scales_in"]


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
    shared = block_split(size, coarse.length, count)
    each, num_padded = shared or (-(-size // coarse.length),) * 2
    blocks = F.pad(flat.float(), (0, num_padded * coarse.length - size)).view(num_padded, coarse.length)
    starts = torch.arange(0, num_padded * coarse.length, coarse.length, device=flat.device)
    counts = (size - starts).clamp_(0, coarse.length)
    coded = coarse.encode(blocks, counts, replica.seed)
    own = coarse.decode(coded)
    if shared is None:
        spare = coded.numel() - coded_bytes(size, coarse.length, coarse.bits)  # bytes of nothing, at the end
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


def rows_of_bytes(scales: Tensor, values: Tensor) -> Tensor:
    """Return for each block its scale (b, 1), in fp32, and then its values (b, some) of one byte each."""
    return torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], dim=1)


def scales_in(coded: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `rows_of_bytes` was given, the values as bytes."""
    return coded[:, :4].contiguous().view(torch.float32), coded[:, 4:].contiguous()
