"""Tensors as the bytes that are sent and received, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bytes_of", "cut", "fill", "flat_of", "require_even", "target_for"]


def flat_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, 1-D, as they lie in memory."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def target_for(tensor: Tensor) -> Tensor:
    """Return where numbers for a tensor are received: its own memory where it lies in one piece."""
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain.view(-1)
    return torch.empty(plain.numel(), dtype=plain.dtype)


@torch.inference_mode()  # only in this mode can tensors be written to that were made in it
def fill(tensor: Tensor, found: Tensor) -> None:
    if found.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(found.view(tensor.shape))


def bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


def cut(row: Tensor, tensor: Tensor, lengths: Sequence[int], size: int) -> list[Tensor]:
    """Split a flat tensor into one part per worker, by rows of the original tensor."""
    each = row.numel() // max(1, len(tensor))
    return list(row.split([each * length for length in lengths or [len(tensor) // size] * size]))


def require_even(whole: Tensor, part: Tensor, size: int, what: str) -> None:
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ValueError(
            f"{what}: {whole.numel():,} numbers of {whole.dtype} are not {size} times {part.numel():,} of {part.dtype}"
        )
