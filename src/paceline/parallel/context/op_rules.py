"""How torch functions are done on slices of the tokens: the table, and the rules that differ from those of cut layers.

Most rules do not care what a cut dim means, and are those of `parallel/tensor/`. Here are the ones about numbers of
tokens that do not divide, about sums over the tokens, and about ranges of them; attention and losses have their own
files. Where no rule applies the tokens are gathered: right, at a price.
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
    """Return the rule for a torch function; one that always raises NotCut where there is none."""
    return RULES.get(name_of(func)) or tensor_rule_of(func)


# ------------------------------------------------------------------------------------------------------------- view


def _viewed_as(cut: SplitTensor, target: tuple[int, ...], func: Func) -> Tensor:
    shape = tuple(full_shape(cut))
    dim, sections = viewed(shape, cut.split_dim, cut.sections, target)
    if not agree(shape, cut.split_dim, cut.sections, target, dim, sections, size=cut.team.size):
        raise CannotSplit(f"{shape} viewed as {target} has other slices of its {shape[cut.split_dim]} tokens")
    local = list(target)
    local[dim] = _team(cut).num_tokens(sections)
    return at(func(cut, tuple(local)), cut, dim, sections)


# ------------------------------------------------------------------------------------------------- ranges of tokens


def _range(cut: SplitTensor, start: int, length: int) -> Tensor:
    """Some of the tokens in a row: they move to the workers that hold their new places (a shift by one moves few)."""
    dim = cut.split_dim
    if (start, length) == (0, sum(cut.sections)):
        return cut
    if len(cut.sections) > 1:
        raise CannotSplit("it takes a range of tokens of several samples")
    if length < cut.team.size:
        raise CannotSplit(f"it takes {length} tokens, fewer than there are workers")
    team = _team(cut)
    held = [slices(cut.sections, size=team.size, index=index) for index in range(team.size)]
    wanted: list[Ranges] = [
        tuple((start + first, start + stop) for first, stop in slices((length,), size=team.size, index=index))
        for index in range(team.size)
    ]
    return at(collectives.moved(cut, team.group, dim=dim, held=held, wanted=wanted), cut, dim, (length,))


def _one_token(cut: SplitTensor, place: int) -> Tensor:
    """One token, on all workers: its holder's, and noughts of the others, summed."""
    team = _team(cut)
    whole = sum(cut.sections)
    if len(cut.sections) > 1 or not -whole <= place < whole:
        raise CannotSplit(f"it takes token {place}")
    [(first, stop)] = slices(cut.sections, size=team.size, index=team.index)
    place %= whole
    own = cut.select(cut.split_dim, place - first) if first <= place < stop else cut.select(cut.split_dim, 0) * 0
    return team.total(own)


def _getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut = _first(args)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    known = all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in index)
    if not known or any(isinstance(one, bool) for one in index):
        raise CannotSplit("it is indexed by a tensor")
    shown = sum(isinstance(one, (int, slice)) for one in index)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (cut.ndim - shown), *index[place + 1 :])
    local: list[Any] = []
    dim, moved = 0, 0  # the source's dim, and by how much the cut one moves
    result: Any = cut
    for one in index:
        if one is None:
            moved += dim <= cut.split_dim
        else:
            if dim == cut.split_dim:
                result, one = _indexed(cut, one)
            elif dim < cut.split_dim:
                moved -= isinstance(one, int)
            dim += 1
        local.append(one)
    if not isinstance(result, SplitTensor):
        return func(result.unsqueeze(cut.split_dim), tuple(local))
    return at(func(result, tuple(local)), result, result.split_dim + moved)


def _indexed(cut: SplitTensor, one: int | slice) -> tuple[Tensor, int | slice]:
    """The tokens that are meant, and the index that is left to be done."""
    if isinstance(one, int):
        return _one_token(cut, one), 0
    start, stop, step = one.indices(sum(cut.sections))
    if step != 1:
        raise CannotSplit("every other token is picked")
    return _range(cut, start, max(0, stop - start)), slice(None)


def _select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut = _first(args)
    if len(args) != 3 or not all(isinstance(one, int) for one in args[1:]):
        raise CannotSplit("its arguments are not plain numbers")
    dim = args[1] % cut.ndim
    if dim == cut.split_dim:
        return _one_token(cut, args[2])
    return at(func(*args), cut, cut.split_dim - (dim < cut.split_dim))


def _narrow(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut = _first(args)
    if len(args) != 4 or not all(isinstance(one, int) for one in args[1:]):
        raise CannotSplit("its arguments are not plain numbers")
    if args[1] % cut.ndim == cut.split_dim:
        return _range(cut, args[2], args[3])
    return at(func(*args), cut, cut.split_dim)


def _split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut = _first(args)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % cut.ndim
    if dim == cut.split_dim:
        raise CannotSplit("the tokens are taken apart")
    return tuple(at(one, cut, cut.split_dim) for one in func(*args, **kwargs))


def _cat(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """As for cut layers; an empty cache of earlier keys is nothing to join."""
    tensors: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    kept = [one for one in tensors if isinstance(one, SplitTensor) or one.numel()]
    if len(kept) == 1 and isinstance(kept[0], SplitTensor):
        return at(kept[0].view_as(kept[0]), kept[0], kept[0].split_dim)
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    lead = next(one for one in kept if isinstance(one, SplitTensor))
    if given % lead.ndim == lead.split_dim:
        raise CannotSplit("tokens are joined to tokens")  # the slices of the joined sequence are others
    return tensor_rule_of(func)(func, (kept, given), {})


# ---------------------------------------------------------------------------------------------------- over the tokens


def _summed(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Sums and means: where they go over the tokens, what each worker has is a part of the sum."""
    cut = _first(args)
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dims_of(given, cut.ndim)
    if dims is not None and cut.split_dim not in dims:
        return tensor_rule_of(func)(func, args, kwargs)
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    dtype = kwargs.get("dtype")
    over = tuple(range(cut.ndim)) if dims is None else dims
    own = torch.sum(cut, over, keepdim=keepdim, dtype=dtype)
    if name_of(func) == "sum":
        return _team(cut).total(own)
    if not own.is_floating_point():
        raise CannotSplit("a mean of whole numbers")
    shape = full_shape(cut)
    count = 1
    for dim in over:
        count *= shape[dim]
    return _team(cut).total(own) / count


def _along_last(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Largest and sorted numbers along one dim that is not that of the tokens."""
    cut = _first(args)
    place = 2 if name_of(func) == "topk" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None if "arg" in name_of(func) else -1)
    if not isinstance(dim, int) or dim % cut.ndim == cut.split_dim:
        raise CannotSplit(f"{name_of(func)} goes over the tokens")
    out = func(*args, **kwargs)
    gone = isinstance(out, Tensor) and out.ndim < cut.ndim and dim % cut.ndim < cut.split_dim
    for one in out if isinstance(out, tuple) else (out,):
        at(one, cut, cut.split_dim - gone)
    return out


def _picked(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.gather(-1, index)`: for each token numbers of its own."""
    if kwargs or len(args) != 3:
        raise CannotSplit("its arguments are given by name")
    cut, dim, index = args
    if not isinstance(cut, SplitTensor) or dim % cut.ndim == cut.split_dim:
        raise CannotSplit("it picks among the tokens")
    if isinstance(index, SplitTensor) and (index.split_dim, index.sections) != (cut.split_dim, cut.sections):
        raise CannotSplit("two tensors meet that are sliced in different ways")
    if not isinstance(index, SplitTensor):
        index = cut.team.meet(index, cut.split_dim - cut.ndim, cut.sections, cut=cut)
    return at(func(cut, dim, index), cut, cut.split_dim)


def _one_hot(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) < 2 and "num_classes" not in kwargs:
        raise CannotSplit("its classes are counted over all tokens")
    cut = _first(args)
    return at(func(*args, **kwargs), cut, cut.split_dim)


def _about_memory(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Where the slice's own data are: code that offloads what backward keeps asks for it, on each worker by itself."""
    return func(*args, **kwargs)


def _first(args: Args) -> SplitTensor:
    if not args or not isinstance(args[0], SplitTensor):
        raise CannotSplit("the tensor that is sliced is not the first argument")
    return args[0]


def _team(cut: SplitTensor) -> ContextGroupOps:
    team: Any = cut.team
    return team


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
