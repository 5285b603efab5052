"""Rules for functions that move, split, merge, select and join dims. Sizes in the arguments are those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor.split_shapes import CannotSplit, Sections, num_held, picked, resolve, viewed
from paceline.parallel.tensor.split_tensor import Rule, SplitTensor, name_of, wrap

__all__ = ["SHAPES", "at", "carried", "dims_of", "full_shape", "views"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def full_shape(split: SplitTensor) -> torch.Size:
    """Return the shape of the whole tensor."""
    shape = list(split.shape)
    shape[split.split_dim] = sum(split.sections)
    return torch.Size(shape)


def at(out: Tensor, like: SplitTensor, dim: int, sections: Sections | None = None) -> Tensor:
    """Make a result a SplitTensor along `dim`, behind the same layer as `like`."""
    return wrap(out, ops=like.ops, dim=dim, sections=sections or like.sections, site=like.site)


def carried(out: Tensor, like: SplitTensor, *, trailing: int) -> Tensor:
    """Make a result a SplitTensor; `trailing` is the dim counted from the end."""
    return at(out, like, out.ndim + trailing)


def dims_of(given: Any, ndim: int) -> tuple[int, ...] | None:
    """Return dims counted from the start; None where all are meant."""
    if given is None or given == ():
        return None
    if isinstance(given, int):
        return (given % ndim,)
    if isinstance(given, (tuple, list)) and all(isinstance(one, int) for one in given):
        return tuple(one % ndim for one in given)
    raise CannotSplit(f"dims are passed as {given!r}")


# ------------------------------------------------------------------------------------------------------------ about


def _shape(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return full_shape(_first(args))


def _size(func: Func, args: Args, kwargs: Kwargs) -> Any:
    shape = full_shape(_first(args))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return shape if dim is None else shape[dim]


def _numel(func: Func, args: Args, kwargs: Kwargs) -> int:
    return full_shape(_first(args)).numel()


def _len(func: Func, args: Args, kwargs: Kwargs) -> int:
    return full_shape(_first(args))[0]


# ------------------------------------------------------------------------------------------------------------- view


Viewed = Callable[[SplitTensor, tuple[int, ...], Func], Tensor]  # sees the split tensor in another shape of the whole


def views(viewed_as: Viewed) -> dict[str, Rule]:
    """Return the rules for functions that view a tensor in another shape; `viewed_as` does it for this kind of
    split.
    """

    def view(func: Func, args: Args, kwargs: Kwargs) -> Any:
        split = _first(args)
        sizes = args[1:] or tuple(kwargs.values())
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        if not all(isinstance(size, int) for size in sizes):
            raise CannotSplit(f"it is viewed as {sizes}")
        return viewed_as(split, resolve(full_shape(split), sizes), func)

    def view_as(func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Also called by torch for a tensor that an autograd function returns unchanged, as in `fully_shard`."""
        split, other = _first(args), args[1] if len(args) > 1 else kwargs["other"]
        if isinstance(other, SplitTensor) and (other.split_dim, other.sections) == (split.split_dim, split.sections):
            return at(func(split, other), split, split.split_dim)
        return viewed_as(
            split, tuple(full_shape(other) if isinstance(other, SplitTensor) else other.shape), Tensor.view
        )

    def flatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
        split = _first(args)
        shape = tuple(full_shape(split))
        start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % len(shape)
        end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % len(shape)
        return viewed_as(split, resolve(shape, (*shape[:start], -1, *shape[end + 1 :])), Tensor.reshape)

    def unflatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
        split = _first(args)
        shape = tuple(full_shape(split))
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        sizes = kwargs.get("sizes", args[2] if len(args) > 2 else None)
        if not isinstance(dim, int) or not isinstance(sizes, (tuple, list)):
            raise CannotSplit("its arguments are not plain numbers")
        dim %= len(shape)
        inner = resolve((shape[dim],), sizes)
        return viewed_as(split, (*shape[:dim], *inner, *shape[dim + 1 :]), Tensor.reshape)

    return {
        "view": view,
        "reshape": view,
        "view_as": view_as,
        "reshape_as": view_as,
        "flatten": flatten,
        "unflatten": unflatten,
    }


def _viewed_as(split: SplitTensor, target: tuple[int, ...], func: Func) -> Tensor:
    shape = tuple(full_shape(split))
    dim, sections = viewed(shape, split.split_dim, split.sections, target)
    if set(sections) != set(
        split.sections
    ):  # in other units: parts hold the same numbers only where both divide evenly
        split.ops.constrain(split, sections, "heads" if len(target) > len(shape) else "features")
    local = list(target)
    local[dim] = num_held(sections, size=split.ops.size, index=split.ops.index)
    return at(func(split, tuple(local)), split, dim, sections)


def _expand(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    sizes = args[1:] or tuple(kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = tuple(sizes[0])
    trailing = split.split_dim - split.ndim
    if not all(isinstance(size, int) for size in sizes) or sizes[trailing] not in (-1, sum(split.sections)):
        raise CannotSplit(f"it is expanded to {sizes}")
    local = list(sizes)
    local[trailing] = -1
    return carried(func(split, *local), split, trailing=trailing)


def _repeat_interleave(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Repeats each number in its place: heads of keys for groups of queries."""
    split = _first(args)
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dims = dims_of(kwargs.get("dim", args[2] if len(args) > 2 else None), split.ndim)
    if not isinstance(repeats, int) or dims is None:
        raise CannotSplit("it repeats by a tensor, or over all dims")
    times = repeats if dims == (split.split_dim,) else 1
    if times > 1:
        split.ops.constrain(split, split.sections, "heads")
    return at(func(*args, **kwargs), split, split.split_dim, tuple(length * times for length in split.sections))


# ------------------------------------------------------------------------------------------------------------- move


def _transpose(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    if len(args) > 1:
        a, b = args[1] % split.ndim, args[2] % split.ndim
    elif "dim0" in kwargs:
        a, b = kwargs["dim0"] % split.ndim, kwargs["dim1"] % split.ndim
    else:  # t, T, mT
        a, b = split.ndim - 2, split.ndim - 1
        if name_of(func) in ("get:T", "t") and split.ndim != 2:
            raise CannotSplit("it is turned round as a matrix")
    return at(func(*args, **kwargs), split, {a: b, b: a}.get(split.split_dim, split.split_dim))


def _permute(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dims = args[1:] or tuple(kwargs.values())
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    return at(func(*args, **kwargs), split, [dim % split.ndim for dim in dims].index(split.split_dim))


def _movedim(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Finds where the dim went by running the function on the meta device."""
    split = _first(args)
    marked = torch.empty([2 if dim == split.split_dim else 1 for dim in range(split.ndim)], device="meta")
    return at(func(*args, **kwargs), split, list(func(marked, *args[1:], **kwargs).shape).index(2))


def _unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % (split.ndim + 1)
    return at(func(*args, **kwargs), split, split.split_dim + (dim <= split.split_dim))


def _squeeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dims = dims_of(kwargs.get("dim", args[1] if len(args) > 1 else None), split.ndim)
    if dims is None:
        dims = tuple(dim for dim, size in enumerate(full_shape(split)) if size == 1)
    gone = [dim for dim in dims if dim != split.split_dim and split.shape[dim] == 1]
    out = torch.squeeze(split, tuple(gone))  # without a dim, a part of length one would be squeezed, too
    return at(out, split, split.split_dim - sum(dim < split.split_dim for dim in gone))


# ------------------------------------------------------------------------------------------------------ pick, and join


def _range(split: SplitTensor, start: int, length: int) -> Tensor:
    """Return a range of the split dim, which must be whole sections of it."""
    before, inside = picked(split.sections, start, length)
    first, held = (num_held(one, size=split.ops.size, index=split.ops.index) for one in (before, inside))
    return at(split.narrow(split.split_dim, first, held), split, split.split_dim, inside)


def _split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    name = name_of(func)
    how = args[1] if len(args) > 1 else next(value for key, value in kwargs.items() if key != "dim")
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % split.ndim
    if dim != split.split_dim:
        return tuple(at(one, split, split.split_dim) for one in func(*args, **kwargs))
    whole = sum(split.sections)
    if isinstance(how, int):
        step = how if name == "split" else -(-whole // how)
        lengths = [min(step, whole - start) for start in range(0, whole, step)]
    elif name == "split" and isinstance(how, (tuple, list)):
        lengths = list(how)
    else:
        raise CannotSplit(f"it is split by {how!r}")
    return _ranges(split, lengths)


def _ranges(split: SplitTensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    bounds = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    try:
        return tuple(_range(split, start, length) for start, length in zip(bounds, lengths, strict=False))
    except CannotSplit as reason:
        wanted = frozenset((bound, sum(split.sections)) for bound in bounds)
        raise CannotSplit(str(reason), bounds=wanted) from None


def _unbind(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % split.ndim
    if dim == split.split_dim:
        whole = sum(split.sections)
        raise CannotSplit("it is taken apart", bounds=frozenset((start, whole) for start in range(whole + 1)))
    return tuple(at(one, split, split.split_dim - (dim < split.split_dim)) for one in func(*args, **kwargs))


def _select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % split.ndim
    if dim == split.split_dim:
        raise CannotSplit("one place of it is picked")
    return at(func(*args, **kwargs), split, split.split_dim - (dim < split.split_dim))


def _narrow(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    if len(args) != 4 or not all(isinstance(one, int) for one in args[1:]):
        raise CannotSplit("its arguments are not plain numbers")
    if args[1] % split.ndim == split.split_dim:
        return _range(split, args[2], args[3])
    return at(func(*args), split, split.split_dim)


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in index) or any(
        isinstance(one, bool) for one in index
    ):
        raise CannotSplit("it is indexed by a tensor")
    shown = sum(isinstance(one, (int, slice)) for one in index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (split.ndim - shown), *index[place + 1 :])
    local: list[Any] = []
    dim, moved = 0, 0  # the source's dim, and by how much the split dim moves
    for one in index:
        if one is None:
            moved += dim <= split.split_dim
        else:
            if dim == split.split_dim:
                split, one = _indexed(split, one), slice(None)
            elif dim < split.split_dim:
                moved -= isinstance(one, int)
            dim += 1
        local.append(one)
    return at(func(split, tuple(local)), split, split.split_dim + moved)


def _indexed(split: SplitTensor, one: int | slice) -> SplitTensor:
    """Index the split dim: all of it, or whole sections."""
    whole = sum(split.sections)
    if isinstance(one, int):
        raise CannotSplit("one place of it is picked", bounds=frozenset((place, whole) for place in range(whole + 1)))
    start, stop, step = one.indices(whole)
    if step != 1:
        raise CannotSplit("every other place of it is picked")
    if (start, stop) == (0, whole):
        return split
    part: Any = _range(split, start, stop - start)
    return part


def _cat(func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensors: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    splits = [one for one in tensors if isinstance(one, SplitTensor)]
    lead = splits[0]
    dim, trailing = given % lead.ndim, lead.split_dim - lead.ndim
    if any(one.split_dim - one.ndim != trailing for one in splits):
        raise CannotSplit("tensors are joined that are split along different dims")
    lead.ops.join(splits)
    if dim == lead.split_dim:
        if len(splits) < len(tensors):
            raise CannotSplit("parts are joined with a tensor that is whole")
        sections = tuple(length for one in splits for length in one.sections)
        return at(func(list(tensors), dim), lead, dim, sections)
    if any(one.sections != lead.sections for one in splits):
        raise CannotSplit("tensors are joined that are split in different sections")
    met = [
        one
        if isinstance(one, SplitTensor) or one.numel() == 0
        else lead.ops.meet(one, trailing, lead.sections, split=lead)
        for one in tensors
    ]
    return at(func(met, dim), lead, lead.split_dim)


def _stack(func: Func, args: Args, kwargs: Kwargs) -> Any:
    tensors: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    splits = [one for one in tensors if isinstance(one, SplitTensor)]
    lead = splits[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % (lead.ndim + 1)
    if len(splits) < len(tensors) or any(
        (one.split_dim, one.sections) != (lead.split_dim, lead.sections) for one in splits
    ):
        raise CannotSplit("tensors are stacked that are split in different ways")
    lead.ops.join(splits)
    return at(func(list(tensors), dim), lead, lead.split_dim + (dim <= lead.split_dim))


def _first(args: Args) -> SplitTensor:
    if not args or not isinstance(args[0], SplitTensor):
        raise CannotSplit("the split tensor is not the first argument")
    return args[0]


SHAPES: dict[str, Rule] = {
    "get:shape": _shape,
    "size": _size,
    "numel": _numel,
    "nelement": _numel,
    "len": _len,
    **views(_viewed_as),
    "expand": _expand,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t", "get:T", "get:mT"), _transpose),
    "permute": _permute,
    "movedim": _movedim,
    "moveaxis": _movedim,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "split": _split,
    "chunk": _split,
    "unbind": _unbind,
    "select": _select,
    "narrow": _narrow,
    "getitem": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
}
