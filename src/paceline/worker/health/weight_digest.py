"""Digests of weights: 64-bit hashes that are equal where all bits are, at memory bandwidth, on any device.

A tensor is a row of 32-bit words m_i, in blocks. A block's digest is the multilinear hash sum k_i m_i mod 2^64, with
fixed odd 64-bit keys k_i that were drawn at random; digests of blocks, and of tensors, are combined by Horner's rule
with an odd factor. A change within one word always changes the digest: an odd k times a difference below 2^32 is not 0
mod 2^64. A change of several words leaves it equal with a chance of at most 2^-31 over the draw of the keys
(Dietzfelbinger 1996; Lemire & Kaser, "Strongly universal string hashing is fast", 2014). With 64-bit words two flipped
sign bits would cancel out, so words are half as long as keys. The digests detect accidents, not malice.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["WeightDigester", "combined_digest"]

WORDS = 1 << 15  # of a block: words, keys and products fit a core's own cache
ROWS = {"cpu": 1, "cuda": 128}  # blocks at once: on a GPU enough to keep it busy
WORD_BYTES = 4
SEED = 0x7061636C
FACTOR = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


class WeightDigester:
    """Computes digests; keeps the keys, and memory for products, on each device."""

    def __init__(self) -> None:
        self._keys: dict[torch.device, Tensor] = {}
        self._products: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def digests(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return one number from 0 to 2^64 - 1 for each tensor; waits for the device once."""
        parts = [self._blocks(_words(tensor)) for tensor in tensors]
        filled = [part for part in parts if part is not None]
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in filled:
            by_device.setdefault(part.device, []).append(part)
        numbers = {device: iter(torch.cat(some).tolist()) for device, some in by_device.items()}
        return [
            0 if part is None else combined_digest(next(numbers[part.device]) for _ in range(part.numel()))
            for part in parts
        ]

    def _blocks(self, words: Tensor) -> Tensor | None:
        """The digest of each block of a row of words, as signed 64-bit numbers; None where there is no word."""
        if not words.numel():
            return None
        keys, memory = self._of(words.device)
        sums: list[Tensor] = []
        whole = words.numel() // WORDS * WORDS
        for rows in words[:whole].view(-1, WORDS).split(memory.shape[0]):
            products = memory[: rows.shape[0]]
            products.copy_(rows)
            sums.append(products.mul_(keys).sum(dim=1))
        rest = words[whole:]
        if rest.numel():
            products = memory[0, : rest.numel()]
            products.copy_(rest)
            sums.append(products.mul_(keys[: rest.numel()]).sum().reshape(1))
        return torch.cat(sums)

    def _of(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._keys:
            drawn = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=torch.Generator().manual_seed(SEED))
            self._keys[device] = (drawn | 1).to(device)
            self._products[device] = torch.empty(ROWS.get(device.type, 1), WORDS, dtype=torch.int64, device=device)
        return self._keys[device], self._products[device]


def combined_digest(digests: Iterable[int]) -> int:
    """Return one digest for many, in their order; their number is not part of it."""
    total = 0
    for digest in digests:
        total = (total * FACTOR + digest) & MASK
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as 32-bit words, the last one padded with zeros; a view where that is possible."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    over = raw.numel() % WORD_BYTES
    if over:
        raw = torch.nn.functional.pad(raw, (0, WORD_BYTES - over))
    elif raw.storage_offset() % WORD_BYTES:
        raw = raw.clone()
    return raw.view(torch.int32)
