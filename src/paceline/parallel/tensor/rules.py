"""How torch functions are done on the parts of cut tensors: the table, and the rules that do not change the shape.

A rule gets the function and its arguments, in which a Cut stands for the plain tensor of the part, and returns what the
function would. It raises NotCut where the parts do not suffice. `rule_of` finds it by the function's name, so that
`x + y`, `x.add(y)`, `torch.add(x, y)` and `x += y` are one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.parallel.tensor.cut import Cut, cuts_in
from paceline.parallel.tensor.rules_products import PRODUCTS
from paceline.parallel.tensor.rules_shape import SHAPES, at, carried, dims_of, full_shape
from paceline.parallel.tensor.shapes import NotCut
from paceline.parallel.tensor.team import Rule, is_in_place, name_of

__all__ = ["rule_of"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@functools.lru_cache(maxsize=4096)
def rule_of(func: Func) -> Rule:
    """Return the rule for a torch function; one that always raises NotCut where there is none."""
    name = name_of(func)
    return RULES.get(name, _about_itself if name.startswith("get:") and name[4:] in ABOUT else _none)


def _none(func: Func, args: Args, kwargs: Kwargs) -> Any:
    raise NotCut(f"there is no rule for {name_of(func)} on parts")


def _about_itself(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Types, devices and the like are the part's own."""
    return func(*args, **kwargs)


def _text(func: Func, args: Args, kwargs: Kwargs) -> str:
    """A debugger prints on one worker alone, so nothing may be gathered here."""
    cut: Cut = args[0]
    return f"Cut(part {cut.team.index} of {cut.team.size} of {full_shape(cut)}, dim {cut.dim_cut}, behind {cut.site})"


def _pointwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Every number of the result comes from numbers at the same place, after broadcasting."""
    if "out" in kwargs:
        raise NotCut("out= is written whole")
    operands = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    cuts = [one for one in operands if isinstance(one, Cut)]
    lead = cuts[0]
    trailing = lead.dim_cut - lead.ndim
    if is_in_place(func) and not isinstance(args[0], Cut):
        raise NotCut("it writes into a tensor that is whole")
    if len(operands) > 1:
        for one in cuts[1:]:
            if (one.dim_cut - one.ndim, one.sections) != (trailing, lead.sections):
                raise NotCut("two tensors meet that are cut in different ways")
        if len(cuts) > 1:
            lead.team.join(cuts)
        if len(cuts) < len(operands):

            def met(value: Any) -> Any:
                is_plain = isinstance(value, Tensor) and not isinstance(value, Cut)
                return lead.team.meet(value, trailing, lead.sections, cut=lead) if is_plain else value

            args, kwargs = tuple(map(met, args)), {key: met(value) for key, value in kwargs.items()}
    return carried(func(*args, **kwargs), lead, trailing=trailing)


def _random(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Dropout and noise: as pointwise, and each part has its own random numbers."""
    cut = next(cuts_in((args, kwargs)))
    is_active = kwargs.get("p", args[1] if len(args) > 1 else 0.5) != 0
    if name_of(func) in DROPOUTS and not (is_active and kwargs.get("training", args[2] if len(args) > 2 else True)):
        return _pointwise(func, args, kwargs)
    with cut.team.own_randomness(cut.device):
        return _pointwise(func, args, kwargs)


def _one(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A copy or conversion of the first argument; other tensors among the arguments only lend their type."""
    cut = args[0]
    if not isinstance(cut, Cut):
        raise NotCut("only a tensor that lends its type is cut")
    out = func(*args, **kwargs)
    return carried(out, cut, trailing=cut.dim_cut - cut.ndim) if isinstance(out, Tensor) else out


def _along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Works along one dim or more (softmax, mean, cumsum): right on parts unless it is along the cut."""
    cut = args[0] if args else None
    if not isinstance(cut, Cut):
        raise NotCut("the tensor is given by name")
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    dims = dims_of(given, cut.ndim)
    if dims is None or cut.dim_cut in dims:
        raise NotCut(f"{name_of(func)} works along the dim that is cut")
    out = func(*args, **kwargs)
    results: Sequence[Tensor] = out if isinstance(out, tuple) else (out,)
    for one in results:
        is_kept = one.ndim == cut.ndim
        at(one, cut, cut.dim_cut if is_kept else cut.dim_cut - sum(dim < cut.dim_cut for dim in dims))
    return out


def _norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Layer and RMS norms: right on parts unless they work along the cut; weight and bias are used by all parts."""
    cut = args[0] if args else kwargs["input"]
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if not isinstance(cut, Cut) or cut.dim_cut >= cut.ndim - len(shape):
        raise NotCut(f"{name_of(func)} works along the dim that is cut")

    def shared(value: Any) -> Any:
        return cut.team.spread(value) if isinstance(value, Tensor) and not isinstance(value, Cut) else value

    out = func(*map(shared, args), **{key: shared(value) for key, value in kwargs.items()})
    return at(out, cut, cut.dim_cut)


def _like(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return at(func(*args, **kwargs), args[0], args[0].dim_cut)


def _whole(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut, by = args
    if by is None:
        return func(cut.team.plain(cut), None)  # it may be cut along tokens as well
    return cut.team.plain(cut) if by is cut.team else cut


def _whole_size(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_zeros(2, 3)`: sizes are given, so the result is plain."""
    return func(*args, **kwargs)


def _names(text: str) -> list[str]:
    return text.split()


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
    "is_floating_point is_complex is_contiguous element_size get_device is_pinned retain_grad register_hook dim "
    "ndimension is_inference hash has_names is_signed is_set_to is_shared storage_offset get:grad set:grad"
)
NEW = _names("new_zeros new_ones new_full new_empty new_tensor")

RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(RANDOM, _random),
    **dict.fromkeys(ONE, _one),
    "get:data": _one,
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(LIKE, _like),
    **dict.fromkeys(ITSELF, _about_itself),
    **dict.fromkeys(NEW, _whole_size),
    "whole": _whole,
    **dict.fromkeys(("repr", "format", "str"), _text),
    **SHAPES,
    **PRODUCTS,
}
