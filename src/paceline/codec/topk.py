"""The largest numbers of a gradient only, and where they are.

Of each block of 65,536 numbers the same share is sent (Stich et al. 2018, "Sparsified SGD with memory"). So a position
takes two bytes, a payload's size is known beforehand, and no sort runs over the whole bucket. Values travel in bf16;
the rounding error remains in the error feedback, like all numbers that are not sent. Bytes: 4 for each number that is
sent: with a ratio of 0.01 one in 100 of fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, GatherPayload, Rounds, as_bytes
from paceline.schedule.payload_sizes import TOP_K_BLOCK, top_k_count

__all__ = ["TopKCodec"]

MIDDLE = 2**15  # positions are stored as signed numbers


class TopKCodec(Codec):
    """`ratio` of the numbers of each block, at least one."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        numbers = flat.float()
        starts = torch.cat([_starts(first, count) for first, count in self._shares(flat.numel())]).to(flat.device)
        offsets = torch.cat(
            [
                numbers[first : first + TOP_K_BLOCK].abs().topk(count, sorted=False).indices
                for first, count in self._shares(flat.numel())
            ]
        )
        values = numbers[starts + offsets].bfloat16()
        rows = yield GatherPayload(as_bytes(values, (offsets - MIDDLE).to(torch.int16)))
        own = torch.zeros_like(numbers).index_copy_(0, starts + offsets, values.float())
        total = torch.zeros_like(numbers)
        for row in rows:
            there = row[values.nbytes :].view(torch.int16).long() + MIDDLE
            total.index_add_(0, starts + there, row[: values.nbytes].view(torch.bfloat16).float())
        flat.copy_(total)
        return own

    def _shares(self, numel: int) -> list[tuple[int, int]]:
        """The first number of each block, and how many of it are sent."""
        lengths = ((first, min(TOP_K_BLOCK, numel - first)) for first in range(0, numel, TOP_K_BLOCK))
        return [(first, top_k_count(length, self.ratio)) for first, length in lengths]


def _starts(first: int, count: int) -> Tensor:
    return torch.full((count,), first)
