"""Tensors whose bytes have not come yet: they come when somebody looks at them, and only those that are looked at.

Questions about shape and type, and views (rows, a slice, the same numbers in another shape) need no bytes. Any other
torch function that meets such a tensor waits for its bytes; from then on it is an ordinary tensor, and the same object.
What goes around torch's functions (a pointer that was taken before) finds memory that cannot be read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.absent_files import bring_pieces, file_of, is_absent
from paceline.parallel.torch_functions import ABOUT, mapped, name_of, on_parts, tensors_in

__all__ = ["AbsentParameter", "AbsentTensor", "as_absent", "bring", "come", "is_of_absent_file"]

QUESTIONS = (ABOUT | {"get:grad", "get:_grad", "_has_compatible_shallow_copy_type"}) - {
    "deepcopy",
    "repr",
    "format",
    "backward",
    "new_tensor",
    "is_set_to",
}
VIEWS = frozenset(
    (
        *("detach", "alias", "get:data", "view", "view_as", "narrow", "select", "split", "split_with_sizes", "chunk"),
        *("unbind", "t", "transpose", "permute", "movedim", "swapaxes", "get:T", "get:mT", "diagonal"),
        *("unsqueeze", "squeeze", "unflatten", "expand", "expand_as", "as_strided"),
    )
)
IF_DENSE = frozenset(("reshape", "flatten", "ravel", "contiguous"))  # views of what is contiguous
TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
INDICES = (int, slice, type(None), type(...))


class AbsentTensor(Tensor):
    """Numbers that have not come yet."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


class AbsentParameter(nn.Parameter):
    """A parameter whose numbers have not come yet."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        come([self])
        return copy.deepcopy(self, memo)  # of the class that it has now


def as_absent(tensor: Tensor) -> Any:
    """Make a tensor or parameter one that asks for its bytes, in place, where it needs some."""
    one: Any = tensor
    if type(one) in (Tensor, nn.Parameter, AbsentTensor) and is_absent(one):
        is_parameter = isinstance(one, nn.Parameter)
        vars(one).pop("_is_param", None)  # of a parameter that was made from another class
        one.__class__ = AbsentParameter if is_parameter else AbsentTensor
    return one


def bring(tensors: Iterable[Tensor]) -> None:
    """Have the bytes of these tensors here, at once; others are passed over."""
    bring_pieces(one for one in tensors if type(one) in (AbsentTensor, AbsentParameter))


def come(tensors: Iterable[Tensor]) -> None:
    """Have the bytes of these tensors here, which are ordinary ones from then on."""
    waiting: list[Any] = [one for one in tensors if type(one) in (AbsentTensor, AbsentParameter)]
    bring_pieces(waiting)
    for one in waiting:
        is_parameter = isinstance(one, nn.Parameter)
        vars(one).pop("_is_param", None)
        one.__class__ = nn.Parameter if is_parameter else Tensor


def is_of_absent_file(tensor: Tensor) -> bool:
    """Whether a tensor lies in a file that came in pieces, or will."""
    return type(tensor) in (Tensor, nn.Parameter, AbsentTensor, AbsentParameter) and file_of(tensor) is not None


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = name_of(func)
    if name in QUESTIONS:
        with on_parts():
            return func(*args, **kwargs)
    if name == "set:data":  # what it had is not looked at
        with on_parts():
            func(*args, **kwargs)
        if not is_absent(args[0]):
            come(args[:1])
        return None
    if name in VIEWS or _is_view(name, args, kwargs):
        with on_parts():
            out = func(*args, **kwargs)
        return mapped(out, lambda one: as_absent(one) if isinstance(one, Tensor) else one)
    waiting = [one for one in tensors_in((args, kwargs)) if type(one) in (AbsentTensor, AbsentParameter)]
    if not waiting:  # in a container of another kind: its memory cannot be read
        raise TypeError(
            f"{name}() of weights that have not come yet: give it the tensors, or call worker.prepare first"
        )
    come(waiting)
    return func(*args, **kwargs)


def _is_view(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function that may copy does not, so that it looks at no number."""
    if not args or not isinstance(args[0], Tensor):
        return False
    one, given = args[0], (*args[1:], *kwargs.values())
    if name == "getitem":
        index = given[0] if isinstance(given[0], tuple) else given[:1]
        return all(type(at) in INDICES for at in index)
    if name in IF_DENSE:
        return one.is_contiguous() and not any(isinstance(other, Tensor) for other in given)
    if name in TYPES or name == "cpu":
        return one.dtype == TYPES.get(name, one.dtype)
    if name == "to" and not kwargs.get("copy"):
        return all(_is_present(one, other) for other in given)
    return False


def _is_present(one: Tensor, given: Any) -> bool:
    """Whether what `to` is given is what the tensor has."""
    if isinstance(given, (torch.dtype, torch.device, str)):
        return given in (one.dtype, one.device, "cpu")
    return given is None or given is False
