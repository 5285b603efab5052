"""Placeholder tensors for embedding tables on parameter servers: they have a shape and a type, and take no memory.

A parameter whose rows lie on parameter servers stays the same object in its module and its optimizer, with such a
tensor for its data: one number seen at every place. All of them are views of a few numbers kept here, so code that goes
over a model's state can recognize them, like meta tensors. On the meta device itself such a parameter could get no
gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["is_remote", "is_without_fetching", "remote_tensor", "sparse_rows", "without_fetching"]

PLAIN = (Tensor, torch.nn.Parameter)  # others need not have a storage

_numbers: dict[torch.dtype, Tensor] = {}
_num_active = 0  # `without_fetching` contexts


def remote_tensor(like: Tensor) -> Tensor:
    """Return a tensor of the same shape and type, on the CPU, without memory of its own; it cannot be written to."""
    kind = like.dtype
    if kind not in _numbers:  # NaN, so they cannot be mistaken for values
        _numbers[kind] = torch.full((), float("nan") if kind.is_floating_point or kind.is_complex else 0, dtype=kind)
    return _numbers[kind].expand(like.shape)


def is_remote(tensor: Tensor) -> bool:
    """Whether a tensor, or one that it is a view of, came from `remote_tensor`."""
    number = _numbers.get(tensor.dtype)
    if number is None or type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.untyped_storage().data_ptr() == number.untyped_storage().data_ptr()


def sparse_rows(numbers: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse tensor of this shape with these rows; their `numbers` are sorted and unique."""
    return torch.sparse_coo_tensor(numbers[None], rows, shape, is_coalesced=True, check_invariants=False)


@contextlib.contextmanager
def without_fetching() -> Iterator[None]:
    """In this context, a module's state contains the placeholders, and nothing is fetched from servers."""
    global _num_active
    _num_active += 1
    try:
        yield
    finally:
        _num_active -= 1


def is_without_fetching() -> bool:
    """Whether a `without_fetching` context is active."""
    return _num_active > 0
