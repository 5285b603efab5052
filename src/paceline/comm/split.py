"""Tensors of which each worker holds some rows: what torch calls a DTensor, seen from one worker.

The *local part* of a tensor is what is here: of a plain tensor all of it, of one that is split its rows. Sums over
replicas, norms, digests and copies work on local parts, and need not know. What is stored has to say which rows they
are: a `Box`. torch's module for DTensors is not imported before there is one: it takes its time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Box", "as_local_of", "box_of", "fill_local", "is_split", "local_part", "rows_of", "split_like", "whole"]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Where a worker's rows are in the whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    first: int  # row

    def offsets(self) -> tuple[int, ...]:
        """Return the place of the rows' first element in each dim."""
        return (self.first, *(0 for _ in self.shape[1:]))


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor is on this worker, detached; it shares the memory."""
    found: Any = tensor.detach()
    return found.to_local() if is_split(found) else found


def rows_of(num_rows: int, *, index: int, size: int) -> tuple[int, int]:
    """Return [first, stop) of the rows that worker `index` of `size` holds: as many each, rounded up, while they last.

    It is the rule of torch.chunk, and of DTensor's Shard(0).
    """
    each = -(-num_rows // size)
    return min(index * each, num_rows), min((index + 1) * each, num_rows)


def box_of(tensor: Tensor) -> Box | None:
    """Return where the rows of a tensor are that is split by rows; None of one that each worker has whole.

    ValueError for any other kind.
    """
    if not is_split(tensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if all(placement.is_replicate() for placement in placements):
        return None
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise ValueError(f"it is spread over workers as {placements}, and not by rows")
    first, _ = rows_of(tensor.shape[0], index=mesh.get_local_rank(), size=mesh.size())
    return Box(tuple(tensor.shape), first)


def as_local_of(local: Tensor, like: Tensor) -> Tensor:
    """Return `local` as a tensor that is split like `like`, a DTensor of the same shape; it shares the memory."""
    if not is_split(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def split_like(source: Tensor, like: Tensor) -> Tensor:
    """Return this worker's part of `source`, which is whole, on the device of `like`, a DTensor split by rows.

    It is split by rows, too, where it has as many, and whole on all workers otherwise.
    """
    if not is_split(like):
        return source
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = like.device_mesh
    has_rows = source.dim() > 0 and source.shape[0] == like.shape[0]
    first, stop = rows_of(source.shape[0], index=mesh.get_local_rank(), size=mesh.size()) if has_rows else (0, 0)
    local = source[first:stop] if has_rows else source
    local = local.to(like.device, copy=True)
    placement = Shard(0) if has_rows else Replicate()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=source.shape, stride=source.contiguous().stride()
    )


@torch.no_grad()
def fill_local(target: Tensor, source: Tensor) -> None:
    """Overwrite what of `target` is on this worker by its rows of `source`, which is whole, and on any device."""
    box = box_of(target)
    local = local_part(target)
    if box is None:
        local.copy_(source)
    elif local.numel():
        local.copy_(source[box.first : box.first + local.shape[0]])


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of one that is split all workers that have a part must call, and it blocks."""
    found: Any = tensor.detach()
    return found.full_tensor() if is_split(found) else found
