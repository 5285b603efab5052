"""Token dispatch: tokens travel to the workers of their experts, and the results travel back.

Each worker has 1 / n of a block's experts, and tokens of its own (Lepikhin et al., "GShard", 2020, section 3.2). A
token goes once to each worker that has some of its experts, however many. No token is dropped, so numbers differ
between workers and are exchanged first:

    counts     how many rows come from each worker                                                 (n numbers each)
    there      a row: the token, its k weights, its k experts by their local numbers, -1: not there
    experts    on pairs of (row, expert); results of one row are added up
    back       one row for each that came; results of one token are added up

Backward makes the same exchanges in reverse. All workers must take part, also one that received no token, since the
others wait for it. So whether backward passes an exchange is decided by values that are equal on all workers, and not
by whether a graph happens to connect it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from paceline.errors import SyncError
from paceline.parallel.second_order import refuse_second_order, refuse_transforms

__all__ = ["ExpertCollectives", "ExpertForward", "TokenRoute", "dispatch_tokens", "route_of"]

ExpertForward = Callable[[Tensor, Tensor, Tensor], Tensor]  # tokens (p, width), experts here (p, 1), weights (p, 1)


class ExpertCollectives(Protocol):
    """The workers that have a block's experts. All of them must make the same calls in the same order; each call
    blocks."""

    @property
    def index(self) -> int:
        """This worker's index in the group: its experts begin at index * num_experts / size."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def is_still(self) -> bool:
        """Whether nothing is sent: in a trial on the meta device only shapes matter."""
        ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send `sent[0]` rows to worker 0, the next `sent[1]` to worker 1 and so on.

        Returns what was received: `received[k]` rows from worker k, in order.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute:
    """Which tokens one worker sends to which worker, and how many it receives."""

    rows: Tensor  # numbers of tokens, in the order in which they are sent: those for worker 0 first
    experts: Tensor  # (rows, k): their experts as the receiver numbers them, from 0; -1: not one of its own
    sent: tuple[int, ...]  # rows to each worker
    received: tuple[int, ...]  # rows from each worker


def route_of(
    index: Tensor, *, num_experts: int, group: ExpertCollectives, block: int, blocks: Sequence[str]
) -> TokenRoute:
    """Return the route of tokens whose experts are `index` (tokens, k); all workers must call it, and it blocks.

    Numbers of no expert go nowhere. `block` is the number of this block among `blocks`; raises SyncError if the workers
    are in different blocks.
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
    sent_counts = torch.stack([torch.full_like(counts, block), counts], 1)
    received_counts = group.exchange(sent_counts, [1] * workers, [1] * workers).tolist()
    for worker, (number, _) in enumerate(received_counts):
        if number != block:
            other = blocks[number] if 0 <= number < len(blocks) else "another model"
            raise SyncError(
                f"worker {worker} of this replica runs the experts of {other} while this one runs those of "
                f"{blocks[block]}: their tokens travel between the workers, so all must run the same routed blocks in "
                "the same order, in every micro-batch. Run all of them, and multiply by 0 what is not wanted"
            )
    return TokenRoute(
        rows=rows, experts=there, sent=tuple(counts.tolist()), received=tuple(rows for _, rows in received_counts)
    )


def dispatch_tokens(
    apply: ExpertForward,
    tokens: Tensor,
    weights: Tensor,
    *,
    route: TokenRoute,
    group: ExpertCollectives,
    is_followed: bool,
) -> Tensor:
    """Return what all workers' experts make of this worker's tokens (tokens, width), by their `weights` (tokens, k).

    `apply` runs the local experts, on pairs. `is_followed`: whether backward will come this way; equal on all workers.
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
        made = _connected(made, came)
    (back,) = _travel((made,), route.received, route.sent, group, anchor)
    return back.new_zeros(tokens.shape[0], *back.shape[1:]).index_add(0, route.rows, back)


def _travel(
    tensors: Sequence[Tensor],
    sent: Sequence[int],
    received: Sequence[int],
    group: ExpertCollectives,
    anchor: Tensor | None,
) -> tuple[Tensor, ...]:
    """Send rows and return those received; with an anchor, backward sends their gradients the other way."""
    if anchor is None:
        return _moved(tensors, sent, received, group)
    refuse_transforms("Layout(experts=...)")
    came: Any = _ExpertTransfer.apply(anchor, group, sent, received, *tensors)
    return came


def _moved(
    tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: ExpertCollectives
) -> tuple[Tensor, ...]:
    """Exchange rows of several tensors, of any types, in one message."""
    if len(tensors) == 1:
        return (group.exchange(tensors[0].contiguous(), sent, received),)
    parts = [_plain(tensor).view(torch.uint8) for tensor in tensors]
    came = group.exchange(torch.cat(parts, 1), sent, received).split([part.shape[1] for part in parts], 1)
    return tuple(_plain(part).view(tensor.dtype) for part, tensor in zip(came, tensors, strict=True))


def _plain(rows: Tensor) -> Tensor:
    """Return contiguous rows, which can be viewed as bytes; a single row may claim to be contiguous with other
    strides.
    """
    is_one = rows.stride() == (rows.shape[1], 1) and rows.storage_offset() == 0
    return rows if is_one else rows.clone(memory_format=torch.contiguous_format)


class _ExpertTransfer(Function):
    """Sends rows forward, and their gradients back."""

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
        # A recomputed block runs again when backward first asks for something that it saved. Saving the anchor makes
        # that moment the same on all workers, whether tokens came or not.
        ctx.save_for_backward(anchor)
        came = _moved(tensors, sent, received, group)
        ctx.mark_non_differentiable(*(one for one in came if not one.is_floating_point()))
        return came

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second_order("Layout(experts=...)")
        _ = ctx.saved_tensors  # a recomputed block runs now, if it has not yet
        leaving = [grad for grad, is_one in zip(grad_outputs, ctx.is_floating, strict=True) if is_one]
        came = iter(_moved(leaving, ctx.received, ctx.sent, ctx.group))
        return (None, None, None, None, *(next(came) if is_one else None for is_one in ctx.is_floating))


def _connected(made: Tensor, came: Tensor) -> Tensor:
    """Return `made`, connected so that backward always reaches `came`, also where there was nothing to compute."""
    result: Any = _Connected.apply(made, came)
    return result


class _Connected(Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, came: Tensor) -> Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        refuse_second_order("Layout(experts=...)")
        return grad_outputs[0], None
