"""Ring attention, for any number of heads: keys and values are passed round a ring and meet each worker's queries.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. The sums over blocks and the
backward are those of Dao et al., "FlashAttention", 2022, algorithms 1 and 4, written in ordinary operations so that
every device supports them. No worker ever has all keys; in backward they are passed round once more, with the sums of
their gradients. For a causal mask each worker first gets a piece of the queries and keys from the front and one from
the back, so that all have equal work. Blocks that the mask hides are never computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from paceline.parallel.context import collectives
from paceline.parallel.context.collectives import ContextCollectives
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.token_slices import Ranges, folded, num_tokens, slices
from paceline.parallel.second_order import refuse_second_order
from paceline.parallel.tensor.split_tensor import on_parts

__all__ = ["AttentionCall", "ring_attention"]

NONE = float("-inf")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The options of an attention call, in sizes of the whole."""

    is_causal: bool
    dropout_p: float
    scale: float
    num_queries: int
    num_keys: int


def ring_attention(
    ops: ContextGroupOps, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
) -> Tensor:
    """Return this worker's tokens of the result: (batch, heads, tokens, features).

    Queries, keys and values are slices of the same kind; keys and values may have fewer heads. `mask` is whole.
    """
    size, every = ops.size, range(ops.size)
    is_folded = call.is_causal and call.num_queries >= 2 * size and call.num_keys >= 2 * size
    held, placed = [], []
    for length in (call.num_queries, call.num_keys):
        held.append([slices((length,), size=size, index=index) for index in every])
        placed.append([folded(length, size=size, index=index) for index in every] if is_folded else held[-1])
    if is_folded:
        query = collectives.moved(query, ops.group, dim=-2, held=held[0], wanted=placed[0])
        key, value = (collectives.moved(one, ops.group, dim=-2, held=held[1], wanted=placed[1]) for one in (key, value))
    seed = int(torch.randint(1 << 62, (1,), device="cpu")) if call.dropout_p > 0 else 0
    plan = _Ring(group=ops.group, call=call, queries=placed[0][ops.index], keys=tuple(placed[1]), seed=seed)
    batch, num_heads, tokens, width = query.shape
    grouped = query.reshape(batch, key.shape[1], num_heads // key.shape[1], tokens, width)
    out: Any = _RingAttention.apply(grouped, key, value, mask, plan)
    out = out.reshape(batch, num_heads, tokens, value.shape[-1])
    return collectives.moved(out, ops.group, dim=-2, held=placed[0], wanted=held[0]) if is_folded else out


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Some queries that meet some keys: their places in local memory, and in the whole."""

    rows: slice
    columns: slice
    row_range: tuple[int, int]
    column_range: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ring:
    """Which worker has which tokens, and how blocks of scores are computed."""

    group: ContextCollectives
    call: AttentionCall
    queries: Ranges
    keys: tuple[Ranges, ...]  # of each worker
    seed: int

    def owner(self, step: int) -> int:
        """Return the worker whose keys are here after `step` passes."""
        return (self.group.index - step) % self.group.size

    def passed(self, tensors: list[Tensor], step: int) -> list[Tensor]:
        """Pass tensors of keys to the next worker; returns those of the previous one. `step` is the one that begins."""
        size, index = self.group.size, self.group.index
        if size == 1:
            return tensors
        length = num_tokens(self.keys[self.owner(step)])
        found = []
        for one in tensors:
            parts = [one if other == (index + 1) % size else one.narrow(-2, 0, 0) for other in range(size)]
            shapes = [
                (*one.shape[:-2], length if other == (index - 1) % size else 0, one.shape[-1]) for other in range(size)
            ]
            found.append(self.group.all_to_all(parts, shapes)[(index - 1) % size])
        return found

    def blocks(self, owner: int) -> Iterator[_Block]:
        """Yield blocks of this worker's queries with the keys of `owner`, except those that a causal mask hides."""
        row = 0
        for first, stop in self.queries:
            column = 0
            for begin, end in self.keys[owner]:
                if first < stop and begin < end and not (self.call.is_causal and begin >= stop):
                    yield _Block(
                        rows=slice(row, row + stop - first),
                        columns=slice(column, column + end - begin),
                        row_range=(first, stop),
                        column_range=(begin, end),
                    )
                column += end - begin
            row += stop - first

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None, block: _Block) -> Tensor:
        """Return (batch, heads of keys, group, rows, columns), in at least single precision."""
        found = query[..., block.rows, :] @ key[:, :, None, block.columns, :].transpose(-2, -1)
        found = found.to(_wide(query)) * self.call.scale
        rows, columns = block.row_range, block.column_range
        if self.call.is_causal and columns[1] - 1 > rows[0]:
            row = torch.arange(*rows, device=query.device)
            column = torch.arange(*columns, device=query.device)
            found = found.masked_fill(column > row[:, None], NONE)
        if mask is None:
            return found
        piece = self.piece(mask, block, query)
        return found.masked_fill(~piece, NONE) if piece.dtype is torch.bool else found + piece

    def piece(self, mask: Tensor, block: _Block, query: Tensor) -> Tensor:
        """Return a view of a block of the mask, with dims as scores have them."""
        for dim, (first, stop) in ((-2, block.row_range), (-1, block.column_range)):
            if mask.shape[dim] > 1:
                mask = mask.narrow(dim, first, stop - first)
        mask = mask[(None,) * (4 - mask.ndim)]
        heads, group = query.shape[1:3]
        return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (heads, group))

    def kept(self, like: Tensor, block: _Block) -> Tensor | None:
        """Return the scaled dropout mask of a block; the same at every call."""
        if self.call.dropout_p <= 0:
            return None
        place = block.row_range[0] * self.call.num_keys + block.column_range[0]
        generator = torch.Generator(like.device).manual_seed((self.seed + place * 0x9E3779B97F4A7C15) % (1 << 62))
        kept = torch.rand(like.shape, generator=generator, device=like.device) >= self.call.dropout_p
        return kept.to(like.dtype) / (1 - self.call.dropout_p)


class _RingAttention(Function):
    """Forward saves the queries, keys, values and result of this worker's tokens, and nothing of other workers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring) -> Tensor:
        wide = _wide(query)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        largest = query.new_full(query.shape[:-1], NONE, dtype=wide)
        weight = torch.zeros_like(largest)
        here = [key, value]
        for step in range(ring.group.size):
            if step:
                here = ring.passed(here, step)
            for block in ring.blocks(ring.owner(step)):
                scores = ring.scores(query, here[0], mask, block)
                before = largest[..., block.rows]
                new = torch.maximum(before, scores.amax(-1))
                shift = new.masked_fill(new == NONE, 0)
                fade = torch.exp(before - shift)
                scores = torch.exp(scores - shift[..., None])
                largest[..., block.rows] = new
                weight[..., block.rows] = weight[..., block.rows] * fade + scores.sum(-1)
                kept = ring.kept(scores, block)
                scores = scores if kept is None else scores * kept
                mixed = scores.to(value.dtype) @ here[1][:, :, None, block.columns, :]
                out[..., block.rows, :] = out[..., block.rows, :] * fade[..., None] + mixed
        out = (out / weight.masked_fill(weight == 0, 1)[..., None]).to(query.dtype)  # zero for a query without keys
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, mask, out, largest.masked_fill(largest == NONE, 0) + weight.log())
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second_order("Layout(context=...)")
        with on_parts():
            return _backward(ctx.ring, grad_outputs[0], *ctx.saved_tensors)


def _backward(
    ring: _Ring, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
    wide = _wide(query)
    delta = (grad * out).sum(-1, dtype=wide)
    norm = norm.masked_fill(norm == NONE, 0)
    grad_query = torch.zeros_like(query, dtype=wide)
    grad_mask = torch.zeros_like(mask) if mask is not None and mask.requires_grad else None
    sums = [torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)]
    here = [key, value]
    for step in range(ring.group.size):
        if step:
            here, sums = ring.passed(here, step), ring.passed(sums, step)
        for block in ring.blocks(ring.owner(step)):
            rows, columns = block.rows, block.columns
            weights = torch.exp(ring.scores(query, here[0], mask, block) - norm[..., rows, None])
            kept = ring.kept(weights, block)
            dropped = weights if kept is None else weights * kept
            upper = grad[..., rows, :]
            sums[1][..., columns, :] += (dropped.to(grad.dtype).transpose(-2, -1) @ upper).sum(2)
            towards = (upper @ here[1][:, :, None, columns, :].transpose(-2, -1)).to(wide)
            towards = towards if kept is None else towards * kept
            change = weights * (towards - delta[..., rows, None])
            if grad_mask is not None:
                place = ring.piece(grad_mask, block, query)
                place += change.sum_to_size(place.shape)
            change = (change * ring.call.scale).to(query.dtype)
            grad_query[..., rows, :] += change @ here[0][:, :, None, columns, :]
            sums[0][..., columns, :] += (change.transpose(-2, -1) @ query[..., rows, :]).sum(2)
    sums = ring.passed(sums, ring.group.size)
    return grad_query.to(query.dtype), sums[0].to(key.dtype), sums[1].to(value.dtype), grad_mask, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
