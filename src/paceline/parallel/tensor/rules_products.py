"""Rules for products of tensors: matrix products, attention, einsum. What is cut must stay outside the sum.

Heads are a batch of products, so cut by heads they need nothing of each other. A sum over the dim that is cut would
give partial results; only the layers that were chosen for it (`layers.py`) do that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.parallel.tensor.cut import Cut, cuts_in
from paceline.parallel.tensor.rules_shape import at, carried
from paceline.parallel.tensor.shapes import NotCut
from paceline.parallel.tensor.team import Rule

__all__ = ["PRODUCTS"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs or min(args[0].ndim, args[1].ndim) < 2:
        raise NotCut("a product with a vector")
    left, right = args
    lead = next(cuts_in(args))
    rows, columns = _trailing(left), _trailing(right)
    if rows == -1 or columns == -2:
        raise NotCut("it sums over the dim that is cut")
    if rows == -2 and columns == -1:
        raise NotCut("rows of one are cut, and columns of the other")
    if (rows or columns) in (-2, -1):  # one side's own dim: the other side is used by all parts
        where = rows or columns or 0
        left, right = (left, _spread(right, lead)) if rows else (_spread(left, lead), right)
        return carried(func(left, right), lead, trailing=where)
    return carried(func(*_batched(lead, left, right)), lead, trailing=_trailing(lead) or 0)


def _baddbmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    lead = next(cuts_in(args))
    if _trailing(lead) != -3 or len(args) != 3:
        raise NotCut("a batch is cut along a dim of its matrices")
    return carried(func(*_batched(lead, *args), **kwargs), lead, trailing=-3)


def _linear(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A layer that all workers hold, on some rows of its input each."""
    cut = args[0]
    if not isinstance(cut, Cut) or cut.dim_cut == cut.ndim - 1:
        raise NotCut("it sums over the dim that is cut")
    rest = [_spread(one, cut) if isinstance(one, Tensor) else one for one in args[1:]]
    named = {key: _spread(one, cut) if isinstance(one, Tensor) else one for key, one in kwargs.items()}
    return at(func(cut, *rest, **named), cut, cut.dim_cut)


def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or not isinstance(args[1], Cut) or args[1].dim_cut != 0:
        raise NotCut("it sums over the dim that is cut")
    bias, rows, weight = args
    if isinstance(weight, Cut) or isinstance(bias, Cut):
        raise NotCut("rows and weights are both cut")
    met = rows.team.meet(bias, -2, rows.sections, cut=rows)
    return at(func(met, rows, rows.team.spread(weight), **kwargs), rows, 0)


def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Scaled dot-product attention over a batch of heads; keys and values may have fewer heads than queries."""
    query, key, value, *rest = args + tuple(kwargs.pop(name) for name in ("query", "key", "value") if name in kwargs)
    mask = rest[0] if rest else kwargs.pop("attn_mask", None)
    lead = query if isinstance(query, Cut) else next(cuts_in((key, value, mask)))
    trailing = _trailing(lead) or 0
    if trailing > -3:
        raise NotCut("attention over a dim of its matrices that is cut")
    cuts = [one for one in (query, key, value, mask) if isinstance(one, Cut)]
    if any(_trailing(one) != trailing for one in cuts):
        raise NotCut("queries, keys and values are cut along different dims")
    if kwargs.get("enable_gqa"):
        # Part k of the queries needs part k of the keys only where both are one section.
        single = [len(one.sections) if isinstance(one, Cut) else one.shape[-3] for one in (query, key, value)]
        if single != [1, 1, 1]:
            raise NotCut("groups of queries share heads of keys that are not cut with them")
        lead.team.join(cuts)
        met = [one if isinstance(one, Cut) else lead.team.spread(one) for one in (query, key, value)]
    else:
        met = list(_batched(lead, query, key, value))
    if isinstance(mask, Cut):
        if mask.sections != lead.sections:
            raise NotCut("the mask is cut in other sections than the queries")
        lead.team.join([lead, mask])
    elif isinstance(mask, Tensor):
        mask = lead.team.meet(mask, trailing, lead.sections, cut=lead)
    call = functools.partial(func, *met, mask, *rest[1:], **kwargs)
    dropout = rest[1] if len(rest) > 1 else kwargs.get("dropout_p", 0.0)
    if dropout > 0:
        with lead.team.own_randomness(lead.device):
            return carried(call(), lead, trailing=trailing)
    return carried(call(), lead, trailing=trailing)


def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Follows the letter of the dim that is cut."""
    if not args or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        raise NotCut("only einsum('ab,bc->ac', x, y) is followed")
    inputs, output = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    operands: list[Tensor] = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    cuts = [one for one in operands if isinstance(one, Cut)]
    letters = {term[one.dim_cut] for term, one in zip(terms, operands, strict=True) if isinstance(one, Cut)}
    if len(letters) != 1 or any(one.sections != cuts[0].sections for one in cuts):
        raise NotCut("its operands are cut in different ways")
    [letter] = letters
    if letter not in output:
        raise NotCut("it sums over the dim that is cut")
    lead = cuts[0]
    lead.team.join(cuts)
    met: list[Tensor] = []
    for term, one in zip(terms, operands, strict=True):
        if isinstance(one, Cut):
            met.append(one)
        elif letter in term:
            met.append(lead.team.scatter(one, dim=term.index(letter), sections=lead.sections))
        else:
            met.append(lead.team.spread(one))
    return at(func(args[0], *met), lead, output.index(letter))


def _trailing(tensor: Tensor) -> int | None:
    """The dim that is cut, counted from the end; None for a plain tensor."""
    return tensor.dim_cut - tensor.ndim if isinstance(tensor, Cut) else None


def _spread(tensor: Tensor, lead: Cut) -> Tensor:
    if isinstance(tensor, Cut):
        raise NotCut("both sides of a product are cut")
    return lead.team.spread(tensor)


def _batched(lead: Cut, *operands: Tensor) -> list[Tensor]:
    """Return operands whose common batch dim is cut."""
    trailing = _trailing(lead) or 0
    cuts = [one for one in operands if isinstance(one, Cut)]
    if any((_trailing(one), one.sections) != (trailing, lead.sections) for one in cuts):
        raise NotCut("two tensors meet that are cut in different ways")
    lead.team.join(cuts)
    return [one if isinstance(one, Cut) else lead.team.meet(one, trailing, lead.sections, cut=lead) for one in operands]


PRODUCTS: dict[str, Rule] = {
    "matmul": _matmul,
    "bmm": _matmul,
    "baddbmm": _baddbmm,
    "linear": _linear,
    "addmm": _addmm,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}
