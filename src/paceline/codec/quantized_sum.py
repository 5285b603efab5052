"""Sum what each replica sends in a coarse form: numbers in blocks, a few bits for each, and a scale for each block.

Sums of such numbers are no such numbers, so they cannot be summed on the way. Two replicas send each other all they
have. More of them would each send everything to all others; so they share the work out: each is sent its share of the
blocks by all, adds it up, and sends the sum to all in the same coarse form (Tang et al. 2021, "1-bit Adam", section 5).
That rounds a second time: what it leaves behind, the replica whose share it is counts as its own.

Bytes, with n replicas: 2 (n-1)/n of the payload, as of a sum that is not coarse.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.base import CodecContext, GatherPayload, Rounds, ScatterPayload
from paceline.schedule.sample_order import mix

__all__ = ["BlockEncoding", "quantized_sum"]

LEAST_BLOCKS = 8  # for each replica: of fewer, a second round costs more than it spares


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
