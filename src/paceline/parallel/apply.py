"""Put a model on its workers as the plan says: the one place that decides the order of the steps.

The model stays the user's own object; everything is done to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup
from paceline.parallel.model_units import blocks_of
from paceline.parallel.part_dtype import convert_parts, forget, later_dtypes, mark
from paceline.parallel.precision import convert
from paceline.parallel.recompute import recompute_blocks
from paceline.plan import Plan

__all__ = ["place", "send_from_first"]

T = TypeVar("T")

CHUNK_BYTES = 32 << 20


def place(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device,
    units: Sequence[str] = (),
    split_layers: Callable[[nn.Module], None] = lambda _: None,
    shard: Callable[[nn.Module], T] = lambda _: None,
) -> T:
    """Convert, move, split, recompute, shard and compile `model`; returns what `shard(model)` does.

    It must be fit (`require_fit`). `units` are names of modules that are recomputed as a whole, in place of repeated
    blocks. `split_layers` splits its layers, or keeps some of its stages. Weights are made equal by `send_from_first`:
    afterwards, or in `split_layers` or `shard`, whichever is the first to make something smaller than the whole.
    """
    convert(model, plan.compute.precision)  # 1. types first: half the bytes to move, or all of the reference's
    if plan.compute.precision == "fp64":
        forget(model)  # it has the reference's types
    later = later_dtypes(model)
    model.to(device)  # 2. before anything keeps a reference to a parameter's storage
    split_layers(model)  # 3. while each layer still has its own forward
    mark(model, later)  # parts may be parameters of their own
    if plan.compute.recompute != "none":  # 4. inside the compiled region, so that the compiler sees it
        keep = "inputs" if plan.compute.recompute == "blocks" else "costly"
        recompute_blocks(model, keep=keep, blocks=blocks_of(model, units))
    done = shard(model)  # 5. outside of recomputation, which calls a block's forward alone and finds it gathered
    convert_parts(model)  # what is left of them here
    if plan.compute.compile:
        model.compile()  # 6. last: in place, lazily compiled at the first forward
    return done


def send_from_first(tensors: Iterable[Tensor], group: WorkerGroup) -> None:
    """Overwrite `tensors` on all workers by those of the first, in place, many small ones at a time; blocks."""
    if group.size == 1:
        return
    waiting: list[Tensor] = []
    filled = 0
    kind: tuple[torch.dtype, torch.device] | None = None
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if waiting and (kind != (tensor.dtype, tensor.device) or filled + size > CHUNK_BYTES):
            _send(waiting, group)
            waiting, filled = [], 0
        kind = (tensor.dtype, tensor.device)
        waiting.append(tensor.detach())
        filled += size
    if waiting:
        _send(waiting, group)


def _send(tensors: list[Tensor], group: WorkerGroup) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    group.broadcast(flat, what="state from worker 0")
    if group.index != 0:
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.size()))
