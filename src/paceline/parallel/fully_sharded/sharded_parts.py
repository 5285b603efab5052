"""Rows of a part of a parameter: what a worker has of it where fully sharded meets tensor or expert parallel.

Such a parameter is a DTensor, whose whole is the part of one tensor or expert parallel worker. DTensor's own answers
(`p.norm()`, `p.full_tensor()`) would be about that part, and nobody would notice. So it is of a class of its own, with
the rules of `partial_parameter.py`. So are the parts that forwards see while they are gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.comm.sharded_tensors import is_sharded
from paceline.parallel.partial_parameter import HeldPart, is_trusted, size_of
from paceline.parallel.torch_functions import ABOUT, POINTWISE, SIZES, name_of, on_parts, tensors_in

__all__ = ["mark_rows_of_part"]


def mark_rows_of_part(tensor: Any, held: HeldPart) -> Any:
    """Make a DTensor one of rows of a part, in place: it stays the same object."""
    tensor.__class__ = _rows_of_part()
    tensor.held = held
    return tensor


@functools.cache
def _rows_of_part() -> Any:
    from torch.distributed.tensor import DTensor

    class RowsOfPart(DTensor):
        """A DTensor of rows of a part of a parameter, or numbers made from them at their places."""

        held: HeldPart

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return _call(func, args, kwargs or {})

        def full_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
            return _whole(self, "full_tensor", super().full_tensor, args, kwargs)

        def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
            return _whole(self, "to_local", super().to_local, args, kwargs)

        def redistribute(self, *args: Any, **kwargs: Any) -> Any:
            return _whole(self, "redistribute", super().redistribute, args, kwargs)

    return RowsOfPart


def _whole(rows: Any, name: str, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run one of DTensor's methods that give out what is in a tensor."""
    if not is_trusted():
        raise rows.held.refusal(f"{name}()")
    return own(*args, **kwargs)


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a torch function that met rows of a part; raises PlanError where it would need the whole."""
    name = name_of(func)
    with on_parts():
        rows: list[Any] = [one for one in tensors_in((args, kwargs)) if hasattr(one, "held")]
        held: HeldPart = rows[0].held
        if name in SIZES and not is_trusted(in_layers=True):
            return size_of(name, held, args, kwargs)
        if name in ABOUT or name == "grad" or is_trusted():  # autograd.grad is refused where it is called
            return func(*args, **kwargs)
        if name in ("get:grad", "get:_grad"):
            found = func(*args, **kwargs)
            return mark_rows_of_part(found, held.gradient) if is_sharded(found) else found
        if name.removesuffix("_") not in POINTWISE:
            raise held.refusal(f"{name}()" if not name.startswith("get:") else f".{name[4:]}")
        for one in tensors_in((args, kwargs)):
            if one.dim() and not hasattr(one, "held"):
                raise held.refusal(f"{name}() with a tensor of shape {list(one.shape)}")
        out: Any = func(*args, **kwargs)
        is_like = isinstance(out, Tensor) and is_sharded(out) and out.shape == rows[0].shape
        return mark_rows_of_part(out, held) if is_like and not hasattr(out, "held") else out
