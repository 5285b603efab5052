"""How torch functions run on slices of the tokens: the table, and the rules that differ from tensor parallelism.

Most rules do not depend on what the split dim means, and are those of `parallel/tensor/`. Here are the ones about
numbers of tokens that do not divide, sums over the tokens, and ranges of them. Attention and losses have their own
files. Where no rule applies, the tokens are gathered: right, but slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.context import collectives
from paceline.parallel.context.attention_rules import ATTENTION
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.loss_rules import LOSSES
from paceline.parallel.context.token_slices import Ranges, agree, slices
from paceline.parallel.tensor.op_rules import rule_of as tensor_rule_of
from paceline.parallel.tensor.shape_rules import at, dims_of, full_shape, views
from paceline.parallel.tensor.split_shapes import CannotSplit, viewed
from paceline.parallel.tensor.split_tensor import Rule, SplitTensor, name_of

__all__ = ["rule_of"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@functools.lru_cache(maxsize=4096)
def rule_of(func: Func) -> Rule:
    """Return the rule for a torch function; where there is none, a rule that always raises CannotSplit."""
    return RULES.get(name_of(func)) or tensor_rule_of(func)


# ------------------------------------------------------------------------------------------------------------- view


def _viewed_as(split: SplitTensor, target: tuple[int, ...], func: Func) -> Tensor:
    shape = tuple(full_shape(split))
    dim, sections = viewed(shape, split.split_dim, split.sections, target)
    if not agree(shape, split.split_dim, split.sections, target, dim, sections, size=split.ops.size):
        raise CannotSplit(f"{shape} viewed as {target} has other slices of its {shape[split.split_dim]} tokens")
    local = list(target)
    local[dim] = _ops(split).num_tokens(sections)
    return at(func(split, tuple(local)), split, dim, sections)


# ------------------------------------------------------------------------------------------------- ranges of tokens


def _range(split: SplitTensor, start: int, length: int) -> Tensor:
    """Return a range of the tokens; they move to the workers that hold their new places (a shift by one moves few)."""
    dim = split.split_dim
    if (start, length) == (0, sum(split.sections)):
        return split
    if len(split.sections) > 1:
        raise CannotSplit("it takes a range of tokens of several samples")
    if length < split.ops.size:
        raise CannotSplit(f"it takes {length} tokens, fewer than there are workers")
    ops = _ops(split)
    held = [slices(split.sections, size=ops.size, index=index) for index in range(ops.size)]
    wanted: list[Ranges] = [
        tuple((start + first, start + stop) for first, stop in slices((length,), size=ops.size, index=index))
        for index in range(ops.size)
    ]
    return at(collectives.moved(split, ops.group, dim=dim, held=held, wanted=wanted), split, dim, (length,))


def _one_token(split: SplitTensor, place: int) -> Tensor:
    """Return one token, on all workers: the sum of its holder's value and the others' zeros."""
    ops = _ops(split)
    whole = sum(split.sections)
    if len(split.sections) > 1 or not -whole <= place < whole:
        raise CannotSplit(f"it takes token {place}")
    [(first, stop)] = slices(split.sections, size=ops.size, index=ops.index)
    place %= whole
    own = (
        split.select(split.split_dim, place - first) if first <= place < stop else split.select(split.split_dim, 0) * 0
    )
    return ops.total(own)


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    known = all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in index)
    if not known or any(isinstance(one, bool) for one in index):
        raise CannotSplit("it is indexed by a tensor")
    shown = sum(isinstance(one, (int, slice)) for one in index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (split.ndim - shown), *index[place + 1 :])
    local: list[Any] = []
    dim, moved = 0, 0  # the source's dim, and by how much the split dim moves
    result: Any = split
    for one in index:
        if one is None:
            moved += dim <= split.split_dim
        else:
            if dim == split.split_dim:
                result, one = _indexed(split, one)
            elif dim < split.split_dim:
                moved -= isinstance(one, int)
            dim += 1
        local.append(one)
    if not isinstance(result, SplitTensor):
        return func(result.unsqueeze(split.split_dim), tuple(local))
    return at(func(result, tuple(local)), result, result.split_dim + moved)


def _indexed(split: SplitTensor, one: int | slice) -> tuple[Tensor, int | slice]:
    """Return the tokens that are meant, and the index that remains to be applied."""
    if isinstance(one, int):
        return _one_token(split, one), 0
    start, stop, step = one.indices(sum(split.sections))
    if step != 1:
        raise CannotSplit("every other token is picked")
    return _range(split, start, max(0, stop - start)), slice(None)


def _select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    if len(args) != 3 or not all(isinstance(one, int) for one in args[1:]):
        raise CannotSplit("its arguments are not plain numbers")
    dim = args[1] % split.ndim
    if dim == split.split_dim:
        return _one_token(split, args[2])
    return at(func(*args), split, split.split_dim - (dim < split.split_dim))


def _narrow(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    if len(args) != 4 or not all(isinstance(one, int) for one in args[1:]):
        raise CannotSplit("its arguments are not plain numbers")
    if args[1] % split.ndim == split.split_dim:
        return _range(split, args[2], args[3])
    return at(func(*args), split, split.split_dim)


def _split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split = _first(args)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % split.ndim
    if dim == split.split_dim:
        raise CannotSplit("the tokens are taken apart")
    return tuple(at(one, split, split.split_dim) for one in func(*args, **kwargs))


def _cat(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """As for split layers; an empty cache of earlier keys is ignored."""
    tensors: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    kept = [one for one in tensors if isinstance(one, SplitTensor) or one.numel()]
    if len(kept) == 1 and isinstance(kept[0], SplitTensor):
        return at(kept[0].view_as(kept[0]), kept[0], kept[0].split_dim)
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    lead = next(one for one in kept if isinstance(one, SplitTensor))
    if given % lead.ndim == lead.split_dim:
        raise CannotSplit("tokens are joined to tokens")  # the joined sequence has other slices
    return tensor_rule_of(func)(func, (kept, given), {})


# ---------------------------------------------------------------------------------------------------- over the tokens


def _summed(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Sums and means: over the tokens, each worker has a part of the sum."""
    split = _first(args)
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dims_of(given, split.ndim)
    if dims is not None and split.split_dim not in dims:
        return tensor_rule_of(func)(func, args, kwargs)
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    dtype = kwargs.get("dtype")
    over = tuple(range(split.ndim)) if dims is None else dims
    own = torch.sum(split, over, keepdim=keepdim, dtype=dtype)
    if name_of(func) == "sum":
        return _ops(split).total(own)
    if not own.is_floating_point():
        raise CannotSplit("a mean of whole numbers")
    shape = full_shape(split)
    count = 1
    for dim in over:
        count *= shape[dim]
    return _ops(split).total(own) / count


def _along_last(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Largest and sorted numbers along one dim that is not that of the tokens."""
    split = _first(args)
    place = 2 if name_of(func) == "topk" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None if "arg" in name_of(func) else -1)
    if not isinstance(dim, int) or dim % split.ndim == split.split_dim:
        raise CannotSplit(f"{name_of(func)} goes over the tokens")
    out = func(*args, **kwargs)
    gone = isinstance(out, Tensor) and out.ndim < split.ndim and dim % split.ndim < split.split_dim
    for one in out if isinstance(out, tuple) else (out,):
        at(one, split, split.split_dim - gone)
    return out


def _picked(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.gather(-1, index)`: each token picks from its own numbers."""
    if kwargs or len(args) != 3:
        raise CannotSplit("its arguments are passed by name")
    split, dim, index = args
    if not isinstance(split, SplitTensor) or dim % split.ndim == split.split_dim:
        raise CannotSplit("it picks among the tokens")
    if isinstance(index, SplitTensor) and (index.split_dim, index.sections) != (split.split_dim, split.sections):
        raise CannotSplit("two tensors meet that are sliced in different ways")
    if not isinstance(index, SplitTensor):
        index = split.ops.meet(index, split.split_dim - split.ndim, split.sections, split=split)
    return at(func(split, dim, index), split, split.split_dim)


def _one_hot(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) < 2 and "num_classes" not in kwargs:
        raise CannotSplit("its classes are counted over all tokens")
    split = _first(args)
    return at(func(*args, **kwargs), split, split.split_dim)


def _about_memory(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Where the slice's own data are: code that offloads activations asks for it, on each worker by itself."""
    return func(*args, **kwargs)


def _first(args: Args) -> SplitTensor:
    if not args or not isinstance(args[0], SplitTensor):
        raise CannotSplit("the sliced tensor is not the first argument")
    return args[0]


def _ops(split: SplitTensor) -> ContextGroupOps:
    ops: Any = split.ops
    return ops


RULES: dict[str, Rule] = {
    **views(_viewed_as),
    "getitem": _getitem,
    "select": _select,
    "narrow": _narrow,
    **dict.fromkeys(("split", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("sum", "mean"), _summed),
    **dict.fromkeys(("topk", "sort", "argsort", "argmax", "argmin"), _along_last),
    "gather": _picked,
    "one_hot": _one_hot,
    **dict.fromkeys(("untyped_storage", "data_ptr"), _about_memory),
    **ATTENTION,
    **LOSSES,
}
