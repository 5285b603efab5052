"""Tensors of which each worker holds a part: by rows, as torch's DTensors, or along any dim.

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
    """What a worker holds of a whole tensor of `shape`: these half-open ranges of one dim, one after the other."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor of this shape; a view where it is one range."""
        parts = [whole.narrow(self.dim, first, stop - first) for first, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorBox:
    """Some of the numbers that are here, and where they begin in the whole tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    part: Tensor  # a view of the local part


@dataclasses.dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How a DTensor lies on its workers, without the DTensor: so that its local part can become one again."""

    shape: tuple[int, ...]  # of the whole
    stride: tuple[int, ...]
    dims: tuple[int | None, ...]  # for each dim of the mesh the tensor's that is split over it; None: all have all

    @staticmethod
    def of(tensor: Tensor) -> DTensorLayout | None:
        """Return that of a DTensor; None for a plain tensor."""
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
    """Return what of a tensor is on this worker, detached; it shares the memory."""
    found: Any = tensor.detach()
    return found.to_local() if is_sharded(found) else found


def rows_of(num_rows: int, *, index: int, size: int) -> tuple[int, int]:
    """Return [first, stop) of the rows that worker `index` of `size` holds: as many each, rounded up, while they last.

    It is the rule of torch.chunk, and of DTensor's Shard(0).
    """
    each = -(-num_rows // size)
    return min(index * each, num_rows), min((index + 1) * each, num_rows)


def boxes(tensor: Tensor, cut: TensorSlice | None = None) -> list[TensorBox] | None:
    """Return what of a tensor is here, box by box; None of one that each worker has whole.

    `cut` says what a tensor is that is smaller than the whole. ValueError where it is spread in any other way.
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
    """The boxes of a local part that is the rows from `first_row` on of what `cut` leaves of a tensor."""
    found: list[TensorBox] = []
    place = 0  # of the range, in what the cut leaves
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
    """The shape of the tensor of which this is a part."""
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
    """Return this worker's part of `source`, which is whole: what `like` is of a tensor, on its device.

    `source` may be anything that goes with that tensor, such as an entry of an optimizer's state: what does not have
    its dims is whole on all workers.
    """
    if cut is not None and source.shape == torch.Size(cut.shape):
        source = cut.take(source)
    elif cut is not None and source.dim():
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
    """Overwrite what of `target` is on this worker by its part of `source`, which is whole, and on any device."""
    if cut is not None:
        source = cut.take(source)
    local, first = local_part(target), 0
    if is_sharded(target) and any(placement.is_shard() for placement in target.placements):
        mesh = target.device_mesh
        first, _ = rows_of(target.shape[0], index=mesh.get_local_rank(), size=mesh.size())
    if local.numel():
        local.copy_(source[first : first + local.shape[0]] if is_sharded(target) else source)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of one that is split all workers that have a part must call, and it blocks."""
    found: Any = tensor.detach()
    return found.full_tensor() if is_sharded(found) else found
