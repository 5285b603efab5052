"""Sharded tensors, of which each worker holds a part: by rows, as torch's DTensors, or along any dim.

The *local part* of a tensor is what this worker holds: all of a plain tensor, the rows of a DTensor. Sums over
replicas, norms, digests and copies work on local parts and need not know more. In a tensor parallel layer the
parameters are plain tensors, smaller than the whole; a `TensorSlice` beside them says which part they are. Checkpoints
must say where the numbers belong: `boxes`. torch's DTensor module is imported only once there is a DTensor, because the
import is slow.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "DTensorLayout",
    "TensorBox",
    "TensorSlice",
    "as_local_of",
    "boxes",
    "fill_local",
    "full_tensor",
    "is_sharded",
    "local_part",
    "part_like",
    "rows_of",
    "whole_shape",
]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlice:
    """A worker's part of a whole tensor of `shape`: these half-open ranges of one dim, one after the other."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor of this shape; a view if it is one range."""
        parts = [whole.narrow(self.dim, first, stop - first) for first, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorBox:
    """A block of the local numbers, and its offsets in the whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    part: Tensor  # a view of the local part


@dataclasses.dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How a DTensor is sharded, without the DTensor itself, so that its local part can become one again."""

    shape: tuple[int, ...]  # of the whole tensor
    stride: tuple[int, ...]
    dims: tuple[int | None, ...]  # for each dim of the mesh, the tensor's dim that is split over it; None: replicated

    @staticmethod
    def of(tensor: Tensor) -> DTensorLayout | None:
        """Return the layout of a DTensor; None for a plain tensor."""
        if not is_sharded(tensor):
            return None
        dims = tuple(getattr(placement, "dim", None) for placement in tensor.placements)
        return DTensorLayout(tuple(tensor.shape), tuple(tensor.stride()), dims)

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Return a DTensor on the mesh of `like` whose local part is `local`; it shares the memory where the device is
        the mesh's."""
        if not is_sharded(like):
            raise ValueError(f"a part of a tensor of shape {self.shape} belongs to a parameter that is not split here")
        from torch.distributed.tensor import DTensor, Replicate, Shard

        return DTensor.from_local(
            local,
            like.device_mesh,
            [Replicate() if dim is None else Shard(dim) for dim in self.dims],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's part of a tensor, detached; it shares the memory."""
    found: Any = tensor.detach()
    return found.to_local() if is_sharded(found) else found


def rows_of(num_rows: int, *, index: int, size: int) -> tuple[int, int]:
    """Return [first, stop) of the rows that worker `index` of `size` holds, by the rule of torch.chunk and Shard(0)."""
    each = -(-num_rows // size)
    return min(index * each, num_rows), min((index + 1) * each, num_rows)


def boxes(tensor: Tensor, cut: TensorSlice | None = None) -> list[TensorBox] | None:
    """Return the local part of a tensor as boxes; None if each worker has the whole tensor.

    `cut` describes a tensor that is smaller than the whole. ValueError if it is distributed in any other way.
    """
    local = local_part(tensor)
    first = 0
    if is_sharded(tensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        if all(placement.is_replicate() for placement in placements):
            return None if cut is None else _boxes_of(local, cut, 0)
        if len(placements) != 1 or not placements[0].is_shard(0):
            raise ValueError(f"it is spread over workers as {placements}, and not by rows")
        first, _ = rows_of(tensor.shape[0], index=mesh.get_local_rank(), size=mesh.size())
    elif cut is None:
        return None
    return _boxes_of(local, cut or TensorSlice(tuple(tensor.shape), 0, ((0, tensor.shape[0]),)), first)


def _boxes_of(local: Tensor, cut: TensorSlice, first_row: int) -> list[TensorBox]:
    """Return the boxes of a local part: the rows from `first_row` on of the slice `cut` of a tensor."""
    found: list[TensorBox] = []
    place = 0  # of the range, in the slice
    for first, stop in cut.ranges:
        offsets = [0] * len(cut.shape)
        if cut.dim == 0:
            begin, end = max(place, first_row), min(place + stop - first, first_row + local.shape[0])
            part = local[begin - first_row : max(begin, end) - first_row]
            offsets[0] = first + begin - place
        else:
            part = local.narrow(cut.dim, place, stop - first)
            offsets[0], offsets[cut.dim] = first_row, first
        place += stop - first
        if part.numel():
            found.append(TensorBox(cut.shape, tuple(offsets), part))
    return found


def whole_shape(tensor: Tensor, cut: TensorSlice | None = None) -> torch.Size:
    """Return the shape of the tensor of which this is a part."""
    return tensor.shape if cut is None else torch.Size(cut.shape)


def as_local_of(local: Tensor, like: Tensor) -> Tensor:
    """Return `local` as a tensor that is split like `like`, a DTensor of the same shape; it shares the memory."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_like(source: Tensor, like: Tensor, cut: TensorSlice | None = None) -> Tensor:
    """Return this worker's part of the whole tensor `source`, sharded like `like`, on its device.

    `source` may be anything that belongs to that tensor, such as an entry of an optimizer's state. Entries without its
    dims are whole on all workers.
    """
    if cut is not None and source.shape == torch.Size(cut.shape):
        source = cut.take(source)
    elif cut is not None and source.numel() > 1:
        raise ValueError(
            f"it has the shape {tuple(source.shape)}, its parameter {cut.shape}, of which each worker holds a part"
        )
    if not is_sharded(like):
        return source.clone() if cut is not None else source
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
def fill_local(target: Tensor, source: Tensor, cut: TensorSlice | None = None) -> None:
    """Overwrite the local part of `target` with its part of the whole tensor `source`, which may be on any device."""
    if cut is not None:
        source = cut.take(source)
    local, first = local_part(target), 0
    if is_sharded(target) and any(placement.is_shard() for placement in target.placements):
        mesh = target.device_mesh
        first, _ = rows_of(target.shape[0], index=mesh.get_local_rank(), size=mesh.size())
    if local.numel():
        local.copy_(source[first : first + local.shape[0]] if is_sharded(target) else source)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor; for a sharded one all workers that have a part must call this, and it blocks."""
    found: Any = tensor.detach()
    return found.full_tensor() if is_sharded(found) else found
