"""Rules for attention over tokens of which each worker has a slice, so that every query meets every key.

Two kinds, for `F.scaled_dot_product_attention` and nn.MultiheadAttention:

- "heads" (`ulysses.py`, DeepSpeed-Ulysses): an all-to-all exchanges tokens for heads. It needs heads that divide.
- "ring" (`ring_attention.py`): keys and values are passed round a ring, for any number of heads.

Attention that a model writes out as two products is followed as such: the keys' tokens are gathered for the first, the
values' for the second, and each worker has its rows of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.ring_attention import AttentionCall, ring_attention
from paceline.parallel.context.ulysses import head_parallel_attention
from paceline.parallel.tensor.multihead_attention import joined_mask
from paceline.parallel.tensor.op_rules import rule_of as tensor_rule_of
from paceline.parallel.tensor.shape_rules import at
from paceline.parallel.tensor.split_shapes import CannotSplit
from paceline.parallel.tensor.split_tensor import Rule, SplitTensor, split_tensors_in

__all__ = ["ATTENTION"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    given: dict[str, Any] = {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    given |= {**dict(zip(NAMES, args, strict=False)), **kwargs}
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    lead = next(split_tensors_in((query, key, value, mask)))
    if isinstance(query, SplitTensor) and query.split_dim < query.ndim - 2:
        return tensor_rule_of(func)(func, args, dict(kwargs))  # split by batch or heads: nothing needs to move
    if not isinstance(query, SplitTensor) or query.split_dim != query.ndim - 2 or len(query.sections) != 1:
        raise CannotSplit("the queries are not sliced by tokens")
    if isinstance(mask, SplitTensor):
        mask = lead.ops.plain(mask)
    ops: Any = lead.ops
    keys = [_sliced(one, ops, lead.site) for one in (key, value)]
    if keys[0] is None or keys[1] is None or keys[0].sections != keys[1].sections:
        raise CannotSplit("there are fewer keys than workers, or keys and values are sliced in different ways")
    call = AttentionCall(
        is_causal=given["is_causal"],
        dropout_p=float(given["dropout_p"]),
        scale=query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"],
        num_queries=query.sections[0],
        num_keys=keys[0].sections[0],
    )
    out = attend(ops, query, keys[0], keys[1], mask, call, is_grouped=given["enable_gqa"])
    return at(out, query, out.ndim - 2)


def _sliced(tensor: Tensor, ops: ContextGroupOps, site: str) -> SplitTensor | None:
    """Return keys or values split by tokens; of those that all workers have whole (an encoder's output), this worker's
    slice."""
    if not isinstance(tensor, SplitTensor):
        sliced: Any = ops.sliced(tensor, dim=tensor.ndim - 2, site=site)
        return sliced if isinstance(sliced, SplitTensor) else None
    return tensor if tensor.split_dim == tensor.ndim - 2 and len(tensor.sections) == 1 else None


def attend(
    ops: ContextGroupOps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: AttentionCall,
    *,
    is_grouped: bool,
) -> Tensor:
    """Return this worker's tokens of the attention's result, all heads; raises CannotSplit where neither kind
    applies.
    """
    num_heads, num_key_heads = (one.shape[-3] if one.ndim > 2 else 0 for one in (query, key))
    is_divided = num_heads > 0 and num_heads % ops.size == 0 and value.shape[-3] == num_key_heads
    is_regular = (num_key_heads == num_heads or is_grouped) and num_key_heads > 0 and num_heads % num_key_heads == 0
    if is_divided and is_regular and ops.kind == "heads":
        ops.attended("heads", call.num_queries)
        return head_parallel_attention(ops, query, key, value, mask, call)
    if query.ndim != 4 or (num_heads != num_key_heads and not is_grouped):
        raise CannotSplit(f"attention over {query.ndim} dims, or with {num_heads} and {num_key_heads} heads")
    ops.attended("ring", call.num_queries)
    return ring_attention(ops, query, key, value, mask, call)


# ------------------------------------------------------------------------------------------------ as a module of torch

# Within it slices follow their rules again. torch itself uses this class and has no public name for it.
with_rules: Callable[[], AbstractContextManager[None]] = torch._C._EnableTorchFunction  # pyright: ignore[reportPrivateUsage]  # see above

MODULE_NAMES = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)


def _multi_head_attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute what nn.MultiheadAttention does with functions that slices support; tensors are (tokens, batch,
    features)."""
    given: dict[str, Any] = {"training": True, "need_weights": True, "average_attn_weights": True}
    given |= {**dict(zip(MODULE_NAMES, args, strict=False)), **kwargs}
    query: Tensor = given["query"]
    odd = [name for name in ("bias_k", "bias_v", "static_k", "static_v") if given.get(name) is not None]
    if odd or given["add_zero_attn"] or query.ndim != 3 or not isinstance(query, SplitTensor) or query.split_dim != 0:
        raise CannotSplit(f"{', '.join(odd) or 'this form of it'} is not followed")
    with with_rules():
        return _as_functions(given)


def _as_functions(given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    query, key, value, num_heads = (given[name] for name in ("query", "key", "value", "num_heads"))
    biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{one}_proj_weight"] for one in "qkv"]
    else:
        weights = given["in_proj_weight"].chunk(3)
    heads = [
        F.linear(one, weight, bias).unflatten(2, (num_heads, weight.shape[0] // num_heads)).permute(1, 2, 0, 3)
        for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    mask = joined_mask(given.get("attn_mask"), given.get("key_padding_mask"), like=query, heads=num_heads)
    dropout_p = given["dropout_p"] if given["training"] else 0.0
    weights_out = None
    if given["need_weights"]:
        scores = heads[0] @ heads[1].transpose(-2, -1) * heads[0].shape[-1] ** -0.5
        weights_out = torch.softmax(scores if mask is None else scores + mask, -1)
        weights_out = F.dropout(weights_out, dropout_p)
        mixed = weights_out @ heads[2]
        weights_out = weights_out.mean(1) if given["average_attn_weights"] else weights_out
    else:
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout_p)
    merged = mixed.permute(2, 0, 1, 3).flatten(2)
    return F.linear(merged, given["out_proj_weight"], given["out_proj_bias"]), weights_out


# ------------------------------------------------------------------------------------------------------------ products


def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Where both sides are sliced by tokens, keep the left side's rows and gather the right side."""
    left, right = args[0], args[1]
    is_plain = len(args) == 2 and not kwargs and min(left.ndim, right.ndim) >= 2
    is_rows = is_plain and isinstance(left, SplitTensor) and left.split_dim == left.ndim - 2
    if is_rows and isinstance(right, SplitTensor) and right.split_dim >= right.ndim - 2:
        ops: Any = left.ops
        ops.attended("rows", sum(left.sections))
        whole = ops.plain(right)
        return at(func(left, whole), left, max(left.ndim, whole.ndim) - 2)
    return tensor_rule_of(func)(func, args, kwargs)


def _einsum(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Keep the first operand that is sliced along a letter of the result; gather operands that are sliced along
    others.
    """
    if not args or not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        raise CannotSplit("only einsum('ab,bc->ac', x, y) is followed")
    inputs, output = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    operands: list[Tensor] = list(args[1]) if isinstance(args[1], (tuple, list)) else list(args[1:])
    letters = [
        term[one.split_dim] if isinstance(one, SplitTensor) else "" for term, one in zip(terms, operands, strict=True)
    ]
    lead = next((place for place, letter in enumerate(letters) if letter and letter in output), None)
    if lead is None:
        raise CannotSplit("it sums over the tokens")
    first: Any = operands[lead]
    met = [
        first.ops.plain(one) if isinstance(one, SplitTensor) and letter != letters[lead] else one
        for one, letter in zip(operands, letters, strict=True)
    ]
    if len(set(letters) - {""}) > 1:
        first.ops.attended("rows", sum(first.sections))
    return tensor_rule_of(func)(func, (args[0], *met), kwargs)


ATTENTION: dict[str, Rule] = {
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "einsum": _einsum,
}
