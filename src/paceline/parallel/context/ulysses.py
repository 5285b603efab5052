"""DeepSpeed-Ulysses: an all-to-all exchanges slices of tokens for slices of heads, around ordinary attention.

Jacobs et al., "DeepSpeed Ulysses", 2023. Each worker gets all tokens of its heads, torch's own kernel attends, and a
second all-to-all restores the slices of tokens. Workers have equal work whatever the mask. Where there are fewer heads
of keys than workers, some are sent to several. The heads of queries must divide among the workers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.context import collectives
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.ring_attention import AttentionCall
from paceline.parallel.context.token_slices import Ranges, head_ranges, key_heads

__all__ = ["head_parallel_attention"]


def head_parallel_attention(
    ops: ContextGroupOps, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
) -> Tensor:
    """Return this worker's tokens of the attention's result; the number of heads must divide among the workers."""
    num_heads, num_key_heads = query.shape[-3], key.shape[-3]
    heads = head_ranges(num_heads, size=ops.size)
    wanted = heads if num_key_heads == num_heads else key_heads(num_heads, num_key_heads, size=ops.size)

    def exchanged(one: Tensor, which: Ranges, length: int) -> Tensor:
        return collectives.by_heads(one, ops.group, dim=-2, length=length, heads=which)

    own_query = exchanged(query, heads, call.num_queries)
    own_key, own_value = (exchanged(one, wanted, call.num_keys) for one in (key, value))
    own_key, own_value = (_regular(one, heads[ops.index], wanted[ops.index], num_heads // num_key_heads)
                          for one in (own_key, own_value))  # fmt: skip
    if mask is not None and mask.ndim > 2 and mask.shape[-3] == num_heads > 1:
        mask = mask[..., slice(*heads[ops.index]), :, :]
    options: dict[str, Any] = {"is_causal": call.is_causal, "scale": call.scale}
    if own_query.shape[-3] != own_key.shape[-3]:
        options["enable_gqa"] = True
    if call.dropout_p > 0:
        with ops.own_randomness(query.device):
            out = F.scaled_dot_product_attention(own_query, own_key, own_value, mask, call.dropout_p, **options)
    else:
        out = F.scaled_dot_product_attention(own_query, own_key, own_value, mask, **options)
    return collectives.by_tokens(out, ops.group, dim=-2, length=call.num_queries, heads=heads)


def _regular(keys: Tensor, heads: tuple[int, int], have: tuple[int, int], group: int) -> Tensor:
    """Return keys in heads that queries share evenly: one for each query's head where a group is on two workers."""
    num_heads, num_keys = heads[1] - heads[0], have[1] - have[0]
    if num_heads == num_keys * group or num_keys == 1:
        return keys
    picked = torch.tensor([head // group - have[0] for head in range(*heads)], device=keys.device)
    return keys.index_select(-3, picked)
