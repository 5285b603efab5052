"""nn.MultiheadAttention on one worker's heads, written with the ordinary functions that split tensors support.

torch's own forward is one function that checks its weights against the module's sizes, so it cannot run on parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.tensor.split_tensor import TensorGroupOps, wrap

__all__ = ["attend", "joined_mask", "refusal"]


def refusal(module: nn.MultiheadAttention) -> str | None:
    """Return the option that is not supported here; None where all are."""
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv=True"
    return "add_zero_attn=True" if module.add_zero_attn else None


def attend(
    module: nn.MultiheadAttention,
    ops: TensorGroupOps,
    site: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what the module's own forward does: (batch, tokens, features), or as `batch_first` says, and weights."""
    parameters: Any = module  # some may be None, which torch's annotations do not say
    is_batched = query.ndim == 3
    as_batch = {id(one): _as_batch(one, module.batch_first, is_batched) for one in (query, key, value)}
    q, k, v = _project(module, ops, site, *(as_batch[id(one)] for one in (query, key, value)))
    mask = joined_mask(attn_mask, key_padding_mask, like=query, heads=module.num_heads, is_batched=is_batched)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout, training=module.training)
        mixed = weights @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    merged: Any = mixed.transpose(1, 2).flatten(2)
    with ops.on_parts():
        partial = F.linear(merged, module.out_proj.weight)
    out = ops.leave(partial, site=site)
    out = out if parameters.out_proj.bias is None else out + parameters.out_proj.bias
    if weights is not None:
        weights = ops.plain(weights)  # users may want them, and the module's own forward returns them whole
        weights = weights.mean(1) if average_attn_weights else weights
        weights = weights if is_batched else weights.squeeze(0)
    if not is_batched:
        return out.squeeze(0), weights
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _as_batch(tensor: Tensor, batch_first: bool, is_batched: bool) -> Tensor:
    if not is_batched:
        return tensor.unsqueeze(0)
    return tensor if batch_first else tensor.transpose(0, 1)


def _project(
    module: nn.MultiheadAttention, ops: TensorGroupOps, site: str, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (batch, heads, tokens, features of a head), split by heads."""
    parameters: Any = module
    width, part = module.embed_dim, module.embed_dim // ops.size
    biases: Any = (None,) * 3 if parameters.in_proj_bias is None else parameters.in_proj_bias.split(part)
    if parameters._qkv_same_embed_dim:
        matrices: Any = module.in_proj_weight.split(part)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    found: list[Tensor] = []
    for tensor, matrix, bias in zip(inputs, matrices, biases, strict=True):
        out = F.linear(ops.enter(tensor), matrix, bias)
        split = wrap(out, ops=ops, dim=out.ndim - 1, sections=(width,), site=site)
        found.append(split.unflatten(-1, (module.num_heads, width // module.num_heads)).transpose(1, 2))
    return found[0], found[1], found[2]


def joined_mask(
    attn_mask: Tensor | None, padding: Tensor | None, *, like: Tensor, heads: int, is_batched: bool = True
) -> Tensor | None:
    """Return both masks as one that is added to the scores, (batch or 1, heads or 1, queries, keys)."""
    total = None
    if attn_mask is not None:
        added = _added(attn_mask, like)
        total = added.view(-1, heads, *added.shape[1:]) if added.ndim == 3 else added[None, None]
    if padding is not None:
        added = _added(padding if is_batched else padding[None], like)[:, None, None, :]
        total = added if total is None else total + added
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, float("-inf"))
