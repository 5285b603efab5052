"""Placeholder tensors for numbers that are on parameter servers: they have a shape and a type, and take no memory.

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
_num_takers = 0  # of states, by whom they are taken as they are


def remote_tensor(like: Tensor) -> Tensor:
    """Return a tensor of the same shape and type, on the CPU, without memory of its own; it cannot be written to."""
    kind = like.dtype
    if kind not in _numbers:  # NaN: nobody takes them for numbers
        _numbers[kind] = torch.full((), float("nan") if kind.is_floating_point or kind.is_complex else 0, dtype=kind)
    return _numbers[kind].expand(like.shape)


def is_remote(tensor: Tensor) -> bool:
    """Whether a tensor, or one that it is a view of, came from `remote_tensor`."""
    number = _numbers.get(tensor.dtype)
    if number is None or type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.untyped_storage().data_ptr() == number.untyped_storage().data_ptr()


def sparse_rows(numbers: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse tensor of this shape that has these rows: their `numbers` are sorted, and none comes twice."""
    return torch.sparse_coo_tensor(numbers[None], rows, shape, is_coalesced=True, check_invariants=False)


@contextlib.contextmanager
def without_fetching() -> Iterator[None]:
    """While it lasts, the state of a module has what is here of it: what is away stays so, and is not fetched."""
    global _num_takers
    _num_takers += 1
    try:
        yield
    finally:
        _num_takers -= 1


def is_without_fetching() -> bool:
    """Whether `without_fetching` lasts."""
    return _num_takers > 0
