"""Put a model on its workers as the plan says: the one place that decides the order of the steps.

The model stays the user's own object; everything is done to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup
from paceline.parallel.compiled import compile_regions, compile_whole, is_compiled_whole
from paceline.parallel.float8 import choose_linears, require_float8
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
    note: Callable[[str], None] = lambda _: None,
) -> T:
    """Convert, move, split, recompute, shard and compile `model`; returns what `shard(model)` does.

    It must be fit (`require_fit`). `units` are names of modules that are recomputed as a whole, in place of repeated
    blocks. `split_layers` splits its layers, or keeps some of its stages. Weights are made equal by `send_from_first`:
    afterwards, or in `split_layers` or `shard`, whichever is the first to make something smaller than the whole.
    `note` is told which layers compute in FP8.
    """
    require_float8(plan.compute, device)
    convert(model, plan.compute.precision)  # 1. types first: half the bytes to move, or all of the reference's
    if plan.compute.precision == "fp64":
        forget(model)  # it has the reference's types
    later = later_dtypes(model)
    model.to(device)  # 2. before anything keeps a reference to a parameter's storage
    float8 = choose_linears(model, plan.compute, units=units) if plan.compute.precision == "fp8" else None
    split_layers(model)  # 3. while each layer still has its own forward
    mark(model, later)  # parts may be parameters of their own
    if float8 is not None:  # 4. after it: layouts are tried on copies in double precision
        note(float8.sentence(model))
        float8.apply(model)
    if plan.compute.recompute != "none":  # 5. inside the compiled region, so that the compiler sees it
        keep = "inputs" if plan.compute.recompute == "blocks" else "costly"
        recompute_blocks(model, keep=keep, blocks=blocks_of(model, units))
    is_whole = is_compiled_whole(plan.layout)
    if plan.compute.compile and not is_whole:  # 6. around recomputation, within what gathers a block
        compile_regions(model, units)
    done = shard(model)  # 7. outside of recomputation, which calls a block's forward alone and finds it gathered
    convert_parts(model)  # what is left of them here
    if plan.compute.compile and is_whole:
        compile_whole(model)  # 8. last: in place, lazily compiled at the first forward
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
