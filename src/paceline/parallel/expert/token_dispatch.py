"""Tokens travel to the experts that they are routed to, and what these make of them travels back.

Each worker has 1 / n of a block's experts, and tokens of its own (Lepikhin et al., "GShard", 2020, section 3.2). A
token goes once to each worker that has some of its experts, however many; no token is dropped, so numbers differ from
worker to worker, and are said first:

    counts     how many rows come from whom                                                       (n numbers each)
    there      a row: the token, its k weights, its k experts by their numbers there, -1: not there
    experts    on pairs of (row, expert), one by one; what belongs to one row is added up
    back       a row for each that came; what belongs to one token is added up

Backward goes the same ways the other way round, on all workers alike: also on one to which nothing came, since the
others wait for it. So whether backward passes an exchange is decided by what is equal on all of them, and not by
whether a graph happens to connect it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from paceline.errors import SyncError

__all__ = ["ExpertCollectives", "ExpertForward", "TokenRoute", "dispatch_tokens", "route_of"]

ExpertForward = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens (p, width), experts here (p, 1), weights (p, 1)


class ExpertCollectives(Protocol):
    """The workers that have a block's experts. All of them must make the same calls in the same order; each blocks."""

    @property
    def index(self) -> int:
        """This worker's place among them: it has the experts from index * num_experts / size on."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def is_still(self) -> bool:
        """Whether nothing is to be sent: only where a forward goes matters, and in which shapes."""
        ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to worker 0, the next `sent[1]` to worker 1 and so on; return what came here:
        `received[k]` rows from worker k, in order."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute:
    """Which tokens one worker sends where, and how many it gets."""

    rows: Tensor  # numbers of tokens, in the order in which they are sent: those for worker 0 first
    experts: Tensor  # (rows, k): their experts as the receiver numbers them, from 0; -1: not one of its own
    sent: tuple[int, ...]  # rows to each worker
    received: tuple[int, ...]  # and from each


def route_of(
    index: Tensor, *, num_experts: int, group: ExpertCollectives, block: int, blocks: Sequence[str]
) -> TokenRoute:
    """Return the route of tokens whose experts are `index` (tokens, k); all workers must call it, and it blocks.

    What is no expert's number goes nowhere. `block` is the number of this block among `blocks`: SyncError where the
    workers are not in the same one.
    """
    each, workers = num_experts // group.size, group.size
    is_known = (index >= 0) & (index < num_experts)
    owner = torch.where(is_known, index.div(each, rounding_mode="floor"), workers)
    goes = torch.zeros(index.shape[0], workers + 1, dtype=torch.bool, device=index.device)
    goes.scatter_(1, owner, True)
    target, rows = goes[:, :workers].t().nonzero(as_tuple=True)
    there = index.index_select(0, rows) - (target * each)[:, None]
    there = torch.where((there >= 0) & (there < each), there, -1).to(torch.int32)
    counts = goes[:, :workers].sum(0)
    said = torch.stack([torch.full_like(counts, block), counts], 1)
    heard = group.exchange(said, [1] * workers, [1] * workers).tolist()
    for worker, (number, _) in enumerate(heard):
        if number != block:
            other = blocks[number] if 0 <= number < len(blocks) else "another model"
            raise SyncError(
                f"worker {worker} of this replica runs the experts of {other} while this one runs those of "
                f"{blocks[block]}: their tokens travel between the workers, so all must run the same routed blocks in "
                "the same order, in every micro-batch. Run all of them, and multiply by 0 what is not wanted"
            )
    return TokenRoute(rows=rows, experts=there, sent=tuple(counts.tolist()), received=tuple(rows for _, rows in heard))


def dispatch_tokens(
    apply: ExpertForward,
    tokens: Tensor,
    weights: Tensor,
    *,
    route: TokenRoute,
    group: ExpertCollectives,
    is_followed: bool,
) -> Tensor:
    """Return what everybody's experts make of this worker's tokens (tokens, width), by their `weights` (tokens, k).

    `apply` does the experts that are here, on pairs. `is_followed`: backward comes this way; equal on all workers.
    """
    anchor = torch.empty(0, device=tokens.device, requires_grad=True) if is_followed else None
    leaving = (tokens.index_select(0, route.rows), weights.index_select(0, route.rows), route.experts)
    came, came_weights, experts = _travel(leaving, route.sent, route.received, group, anchor)
    flat = (experts >= 0).reshape(-1).nonzero().reshape(-1)
    row = flat.div(experts.shape[1], rounding_mode="floor")
    is_one_each = flat.numel() == came.shape[0]  # no row comes without an expert
    made = apply(
        came if is_one_each else came.index_select(0, row),
        experts.reshape(-1).index_select(0, flat).long()[:, None],
        came_weights.reshape(-1).index_select(0, flat)[:, None],
    )
    if not is_one_each:
        made = made.new_zeros(came.shape[0], *made.shape[1:]).index_add(0, row, made)
    if anchor is not None:
        made = _tied(made, came)
    (back,) = _travel((made,), route.received, route.sent, group, anchor)
    return back.new_zeros(tokens.shape[0], *back.shape[1:]).index_add(0, route.rows, back)


def _travel(
    tensors: Sequence[Tensor],
    sent: Sequence[int],
    received: Sequence[int],
    group: ExpertCollectives,
    anchor: Tensor | None,
) -> tuple[Tensor, ...]:
    """Send rows, and return those that came; with an anchor their gradients go the other way in backward."""
    if anchor is None:
        return _moved(tensors, sent, received, group)
    came: Any = _ExpertTransfer.apply(anchor, group, sent, received, *tensors)
    return came


def _moved(
    tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: ExpertCollectives
) -> tuple[Tensor, ...]:
    """Rows of several tensors, of any types, in one message."""
    if len(tensors) == 1:
        return (group.exchange(tensors[0].contiguous(), sent, received),)
    parts = [_plain(tensor).view(torch.uint8) for tensor in tensors]
    came = group.exchange(torch.cat(parts, 1), sent, received).split([part.shape[1] for part in parts], 1)
    return tuple(_plain(part).view(tensor.dtype) for part, tensor in zip(came, tensors, strict=True))


def _plain(rows: Tensor) -> Tensor:
    """Rows of numbers one after the other, as bytes can be seen as numbers; a single row may say that it is so when its
    strides are not."""
    is_one = rows.stride() == (rows.shape[1], 1) and rows.storage_offset() == 0
    return rows if is_one else rows.clone(memory_format=torch.contiguous_format)


class _ExpertTransfer(Function):
    """Rows there, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: ExpertCollectives,
        sent: Sequence[int],
        received: Sequence[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        ctx.is_floating = [tensor.is_floating_point() for tensor in tensors]
        # A block that is recomputed runs again when something that it kept is first asked for. Were nothing kept here,
        # that would be sooner or later than this exchange, as tokens happened to come or not.
        ctx.save_for_backward(anchor)
        came = _moved(tensors, sent, received, group)
        ctx.mark_non_differentiable(*(one for one in came if not one.is_floating_point()))
        return came

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's stub lets ctx be a keyword
        _ = ctx.saved_tensors  # a recomputed block runs now, if it has not yet
        leaving = [grad for grad, is_one in zip(grad_outputs, ctx.is_floating, strict=True) if is_one]
        came = iter(_moved(leaving, ctx.received, ctx.sent, ctx.group))
        return (None, None, None, None, *(next(came) if is_one else None for is_one in ctx.is_floating))


def _tied(made: Tensor, came: Tensor) -> Tensor:
    """Return `made`, through which backward comes to `came` in any case: also where there was nothing to make."""
    result: Any = _Tied.apply(made, came)
    return result


class _Tied(Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, came: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's stub lets ctx be a keyword
        return grad_outputs[0], None
