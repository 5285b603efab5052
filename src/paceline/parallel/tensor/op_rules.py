"""How torch functions run on the parts of split tensors: the table of rules, pointwise rules and rules for products.

A rule gets the function and its arguments, in which a SplitTensor stands for the plain tensor of the part. It returns
what the function would, or raises CannotSplit where the parts do not suffice. `rule_of` finds it by the function's
name, so that `x + y`, `x.add(y)`, `torch.add(x, y)` and `x += y` share one row.

In products (matrix products, attention, einsum) the split dim must not be summed over: the result would be a partial
sum, which only layers chosen for it (`layers.py`) may return. Heads are a batch of products, so attention split by
heads needs nothing from other workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.parallel.tensor.shape_rules import SHAPES, at, carried, dims_of, full_shape
from paceline.parallel.tensor.split_gradients import hooked
from paceline.parallel.tensor.split_shapes import CannotSplit
from paceline.parallel.tensor.split_tensor import Rule, SplitTensor, is_in_place, name_of, split_tensors_in

__all__ = ["rule_of"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@functools.lru_cache(maxsize=4096)
def rule_of(func: Func) -> Rule:
    """Return the rule for a torch function; where there is none, a rule that always raises CannotSplit."""
    name = name_of(func)
    return RULES.get(name, _about_itself if name.startswith("get:") and name[4:] in ABOUT else _none)


def _none(func: Func, args: Args, kwargs: Kwargs) -> Any:
    raise CannotSplit(f"there is no rule for {name_of(func)} on parts")


def _about_itself(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Types, devices and the like are those of the part."""
    return func(*args, **kwargs)


def _text(func: Func, args: Args, kwargs: Kwargs) -> str:
    """A debugger prints on one worker alone, so nothing may be gathered here."""
    split: SplitTensor = args[0]
    where = f"dim {split.split_dim}, behind {split.site}"
    return f"SplitTensor(part {split.ops.index} of {split.ops.size} of {full_shape(split)}, {where})"


def _where(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """With one argument it finds places, as many as there happen to be."""
    if len(args) + len(kwargs) < 3:
        raise CannotSplit("where() of one argument looks for places in the whole")
    return _pointwise(func, args, kwargs)


def _pointwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Each number of the result comes from numbers at the same place, after broadcasting."""
    if "out" in kwargs:
        raise CannotSplit("out= is written whole")
    operands = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    splits = [one for one in operands if isinstance(one, SplitTensor)]
    lead = splits[0]
    trailing = lead.split_dim - lead.ndim
    if is_in_place(func) and not isinstance(args[0], SplitTensor):
        raise CannotSplit("it writes into a tensor that is whole")
    if len(operands) > 1:
        for one in splits[1:]:
            if (one.split_dim - one.ndim, one.sections) != (trailing, lead.sections):
                raise CannotSplit("two tensors meet that are split in different ways")
        if len(splits) > 1:
            lead.ops.join(splits)
        if len(splits) < len(operands):

            def met(value: Any) -> Any:
                is_plain = isinstance(value, Tensor) and not isinstance(value, SplitTensor)
                return lead.ops.meet(value, trailing, lead.sections, split=lead) if is_plain else value

            args, kwargs = tuple(map(met, args)), {key: met(value) for key, value in kwargs.items()}
    return carried(func(*args, **kwargs), lead, trailing=trailing)


def _random(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Dropout and noise: pointwise, but each part draws its own random numbers."""
    split = next(split_tensors_in((args, kwargs)))
    is_active = kwargs.get("p", args[1] if len(args) > 1 else 0.5) != 0
    if name_of(func) in DROPOUTS and not (is_active and kwargs.get("training", args[2] if len(args) > 2 else True)):
        return _pointwise(func, args, kwargs)
    with split.ops.own_randomness(split.device):
        return _pointwise(func, args, kwargs)


def _one(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A copy or conversion of the first argument; other tensors among the arguments only provide their type."""
    split = args[0] if args else None
    out = func(*args, **kwargs)
    if not isinstance(split, SplitTensor):
        return out  # a whole tensor gets the type of a split one
    return carried(out, split, trailing=split.split_dim - split.ndim) if isinstance(out, Tensor) else out


def _register_hook(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A hook on the gradient: the user's sees that it is a part."""
    split, hook = args[0], kwargs.get("hook", args[-1])
    return func(split, hooked(split, hook))


def _along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Functions along one dim or more (softmax, mean, cumsum): right on parts unless they work along the split dim."""
    split = args[0] if args else None
    if not isinstance(split, SplitTensor):
        raise CannotSplit("the tensor is passed by name")
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dims_of(given, split.ndim)
    if dims is None or split.split_dim in dims:
        raise CannotSplit(f"{name_of(func)} works along the split dim")
    out = func(*args, **kwargs)
    results: Sequence[Tensor] = out if isinstance(out, tuple) else (out,)
    for one in results:
        is_kept = one.ndim == split.ndim
        at(one, split, split.split_dim if is_kept else split.split_dim - sum(dim < split.split_dim for dim in dims))
    return out


def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Layer and RMS norms: right on parts unless they work along the split dim; all parts use weight and bias."""
    split = args[0] if args else kwargs["input"]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if not isinstance(split, SplitTensor) or split.split_dim >= split.ndim - len(shape):
        raise CannotSplit(f"{name_of(func)} works along the split dim")

    def shared(value: Any) -> Any:
        return (
            split.ops.copy_to_group(value)
            if isinstance(value, Tensor) and not isinstance(value, SplitTensor)
            else value
        )

    out = func(*map(shared, args), **{key: shared(value) for key, value in kwargs.items()})
    return at(out, split, split.split_dim)


def _like(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return at(func(*args, **kwargs), args[0], args[0].split_dim)


def _whole(func: Func, args: Args, kwargs: Kwargs) -> Any:
    split, by = args
    if by is None:
        return func(split.ops.plain(split), None)  # it may be split along tokens as well
    return split.ops.plain(split) if by is split.ops else split


def _whole_size(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_zeros(2, 3)`: the arguments say the sizes, so the result is plain."""
    return func(*args, **kwargs)


def _names(text: str) -> list[str]:
    return text.split()


def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs or min(args[0].ndim, args[1].ndim) < 2:
        raise CannotSplit("a product with a vector")
    left, right = args
    lead = next(split_tensors_in(args))
    rows, columns = _trailing(left), _trailing(right)
    if rows == -1 or columns == -2:
        raise CannotSplit("it sums over the split dim")
    if rows == -2 and columns == -1:
        raise CannotSplit("rows of one are split, and columns of the other")
    if (rows or columns) in (-2, -1):  # one side's own dim: all parts use the other side
        where = rows or columns or 0
        left, right = (left, _spread(right, lead)) if rows else (_spread(left, lead), right)
        return carried(func(left, right), lead, trailing=where)
    return carried(func(*_batched(lead, left, right)), lead, trailing=_trailing(lead) or 0)


def _baddbmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    lead = next(split_tensors_in(args))
    if _trailing(lead) != -3 or len(args) != 3:
        raise CannotSplit("a batch is split along a dim of its matrices")
    return carried(func(*_batched(lead, *args), **kwargs), lead, trailing=-3)


def _linear(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A layer that all workers hold whole, applied to each worker's rows of the input."""
    split = args[0]
    if not isinstance(split, SplitTensor) or split.split_dim == split.ndim - 1:
        raise CannotSplit("it sums over the split dim")
    rest = [_spread(one, split) if isinstance(one, Tensor) else one for one in args[1:]]
    named = {key: _spread(one, split) if isinstance(one, Tensor) else one for key, one in kwargs.items()}
    return at(func(split, *rest, **named), split, split.split_dim)


def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or not isinstance(args[1], SplitTensor) or args[1].split_dim != 0:
        raise CannotSplit("it sums over the split dim")
    bias, rows, weight = args
    if isinstance(weight, SplitTensor) or isinstance(bias, SplitTensor):
        raise CannotSplit("rows and weights are both split")
    met = rows.ops.meet(bias, -2, rows.sections, split=rows)
    return at(func(met, rows, rows.ops.copy_to_group(weight), **kwargs), rows, 0)


def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Scaled dot-product attention over a batch of heads; keys and values may have fewer heads than queries."""
    query, key, value, *rest = args + tuple(kwargs.pop(name) for name in ("query", "key", "value") if name in kwargs)
    mask = rest[0] if rest else kwargs.pop("attn_mask", None)
    lead = query if isinstance(query, SplitTensor) else next(split_tensors_in((key, value, mask)))
    trailing = _trailing(lead) or 0
    if trailing > -3:
        raise CannotSplit("attention over a split dim of its matrices")
    splits = [one for one in (query, key, value, mask) if isinstance(one, SplitTensor)]
    if any(_trailing(one) != trailing for one in splits):
        raise CannotSplit("queries, keys and values are split along different dims")
    if kwargs.get("enable_gqa"):
        # Part k of the queries needs only part k of the keys if both are one section.
        single = [len(one.sections) if isinstance(one, SplitTensor) else one.shape[-3] for one in (query, key, value)]
        if single != [1, 1, 1]:
            raise CannotSplit("groups of queries share heads of keys that are not split with them")
        lead.ops.join(splits)
        met = [one if isinstance(one, SplitTensor) else lead.ops.copy_to_group(one) for one in (query, key, value)]
    else:
        met = list(_batched(lead, query, key, value))
    if isinstance(mask, SplitTensor):
        if mask.sections != lead.sections:
            raise CannotSplit("the mask is split in other sections than the queries")
        lead.ops.join([lead, mask])
    elif isinstance(mask, Tensor):
        mask = lead.ops.meet(mask, trailing, lead.sections, split=lead)
    call = functools.partial(func, *met, mask, *rest[1:], **kwargs)
    dropout = rest[1] if len(rest) > 1 else kwargs.get("dropout_p", 0.0)
    if dropout > 0:
        with lead.ops.own_randomness(lead.device):
            return carried(call(), lead, trailing=trailing)
    return carried(call(), lead, trailing=trailing)


def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Follows the letter of the split dim."""
    if not args or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        raise CannotSplit("only einsum('ab,bc->ac', x, y) is followed")
    inputs, output = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    operands: list[Tensor] = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    splits = [one for one in operands if isinstance(one, SplitTensor)]
    letters = {term[one.split_dim] for term, one in zip(terms, operands, strict=True) if isinstance(one, SplitTensor)}
    if len(letters) != 1 or any(one.sections != splits[0].sections for one in splits):
        raise CannotSplit("its operands are split in different ways")
    [letter] = letters
    if letter not in output:
        raise CannotSplit("it sums over the split dim")
    lead = splits[0]
    lead.ops.join(splits)
    met: list[Tensor] = []
    for term, one in zip(terms, operands, strict=True):
        if isinstance(one, SplitTensor):
            met.append(one)
        elif letter in term:
            met.append(lead.ops.scatter(one, dim=term.index(letter), sections=lead.sections))
        else:
            met.append(lead.ops.copy_to_group(one))
    return at(func(args[0], *met), lead, output.index(letter))


def _trailing(tensor: Tensor) -> int | None:
    """Return the split dim counted from the end; None for a plain tensor."""
    return tensor.split_dim - tensor.ndim if isinstance(tensor, SplitTensor) else None


def _spread(tensor: Tensor, lead: SplitTensor) -> Tensor:
    if isinstance(tensor, SplitTensor):
        raise CannotSplit("both sides of a product are split")
    return lead.ops.copy_to_group(tensor)


def _batched(lead: SplitTensor, *operands: Tensor) -> list[Tensor]:
    """Return operands with a common batch dim that is split."""
    trailing = _trailing(lead) or 0
    splits = [one for one in operands if isinstance(one, SplitTensor)]
    if any((_trailing(one), one.sections) != (trailing, lead.sections) for one in splits):
        raise CannotSplit("two tensors meet that are split in different ways")
    lead.ops.join(splits)
    return [
        one if isinstance(one, SplitTensor) else lead.ops.meet(one, trailing, lead.sections, split=lead)
        for one in operands
    ]


PRODUCTS: dict[str, Rule] = {
    "matmul": _matmul,
    "bmm": _matmul,
    "baddbmm": _baddbmm,
    "linear": _linear,
    "addmm": _addmm,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}

ABOUT = frozenset(
    _names(
        "dtype device requires_grad grad_fn layout is_leaf is_cuda is_cpu is_meta is_mps is_xpu is_sparse is_quantized "
        "is_nested _version _base ndim output_nr is_mkldnn is_complex names _backward_hooks retains_grad is_sparse_csr"
    )
)
DROPOUTS = frozenset(_names("dropout alpha_dropout feature_alpha_dropout"))

POINTWISE = _names(
    "add sub rsub mul div true_divide truediv floordiv floor_divide mod remainder fmod pow neg pos positive abs sign "
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh "
    "erf erfc sigmoid logit relu relu6 leaky_relu prelu elu celu selu gelu silu mish softplus softsign hardtanh "
    "hardsigmoid hardswish tanhshrink threshold logsigmoid clamp clamp_min clamp_max clip maximum minimum fmax fmin "
    "where masked_fill lerp addcmul addcdiv eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not "
    "logical_xor and or xor invert bitwise_not bitwise_and bitwise_or nan_to_num round floor ceil trunc frac sinc "
    "copysign heaviside ldexp hypot"
)
RANDOM = _names("dropout alpha_dropout bernoulli rand_like randn_like uniform normal")
ONE = _names(
    "to float double half bfloat16 type type_as contiguous clone detach requires_grad cpu cuda long int bool byte "
    "alias resolve_conj resolve_neg data"
)
ALONG = _names(
    "softmax log_softmax softmin mean sum var std amax amin logsumexp cumsum cumprod prod norm vector_norm normalize "
    "var_mean std_mean"
)
LIKE = _names("zeros_like ones_like full_like empty_like")
ITSELF = _names(
    "is_floating_point is_complex is_contiguous element_size get_device is_pinned retain_grad dim "
    "ndimension is_inference hash has_names is_signed is_set_to is_shared storage_offset get:grad set:grad"
)
NEW = _names("new_zeros new_ones new_full new_empty new_tensor")

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    "where": _where,
    **dict.fromkeys(RANDOM, _random),
    **dict.fromkeys(ONE, _one),
    "get:data": _one,
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(LIKE, _like),
    **dict.fromkeys(ITSELF, _about_itself),
    "register_hook": _register_hook,
    **dict.fromkeys(NEW, _whole_size),
    "whole": _whole,
    **dict.fromkeys(("repr", "format", "str"), _text),
    **SHAPES,
    **PRODUCTS,
}
