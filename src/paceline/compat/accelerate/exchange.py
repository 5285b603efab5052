"""What workers of an Accelerate program exchange: nested tensors and objects, of any length on each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.compat.accelerate.world import ProgramWorld

__all__ = ["gather_values", "mapped", "pad_values", "part_of_values", "reduce_values"]


def mapped(value: Any, change: Callable[[Tensor], Any], *, other: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a tree of lists, tuples and mappings with each tensor changed, and each other leaf by `other`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        found = {key: mapped(one, change, other=other) for key, one in value.items()}
        return found if type(value) is dict else type(value)(found)  # pyright: ignore[reportCallIssue]  # as Accelerate does
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change, other=other) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(one, change, other=other) for one in value)
    return other(value)


def gather_values(
    value: Any, world: ProgramWorld, *, is_object: bool = False, keep: tuple[int, int] | None = None
) -> Any:
    """Return a tree with the workers' tensors behind each other along dim 0, on every worker.

    Tensors may have other lengths on other workers. `is_object`: the value is a list, and the lists are joined. `keep`:
    (rows, real): of what has so many rows only the first `real` are gathered; with real=0 nothing is. Raises TypeError
    for a tree with other leaves than tensors.
    """
    if is_object:
        own = list(value) if isinstance(value, (list, tuple)) else [value]
        if keep is not None and keep[0] != keep[1]:
            own = own[: keep[1]]
        return [one for found in world.everywhere(own) for one in found]
    if keep is not None and keep[0] != keep[1]:
        value = mapped(value, lambda tensor: _kept(tensor, *keep), other=_refuse)
    if world.size * world.num_same == 1:
        return mapped(value, lambda tensor: tensor, other=_refuse)
    own_tensors: list[Tensor] = []
    mapped(value, lambda tensor: own_tensors.append(tensor.detach()), other=_refuse)
    everywhere: list[list[Tensor]] = world.everywhere(own_tensors)
    joined = iter([_joined(parts, like=own) for own, *parts in zip(own_tensors, *everywhere, strict=True)])
    return mapped(value, lambda _: next(joined))


def _kept(tensor: Tensor, rows: int, real: int) -> Tensor:
    """The rows of a batch that count, of what has one for each sample; without any that do, nothing."""
    if tensor.dim() and (len(tensor) == rows or real == 0):
        return tensor[:real]
    return tensor


def _joined(parts: list[Tensor], *, like: Tensor) -> Tensor:
    rows = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    filled = [part for part in rows if part.numel()] or rows[:1]
    return torch.cat([part.to(like.device) for part in filled])


def reduce_values(value: Any, world: ProgramWorld, *, reduction: str, scale: float) -> Any:
    """Return a tree with the sums, or means, of the workers' tensors. Raises ValueError for another reduction."""
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction={reduction!r} must be 'sum', 'mean' or 'none'")
    own_tensors: list[Tensor] = []
    mapped(value, lambda tensor: own_tensors.append(tensor.detach()), other=_refuse)
    everywhere: list[list[Tensor]] = (
        world.everywhere(own_tensors) if reduction != "none" and world.size * world.num_same > 1 else [own_tensors]
    )
    summed = iter(
        [_sum([one.to(own.device) for one in parts]) for own, *parts in zip(own_tensors, *everywhere, strict=True)]
    )
    factor = scale / (len(everywhere) if reduction == "mean" else 1)
    return mapped(value, lambda _: next(summed) if factor == 1.0 else next(summed) * factor)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def pad_values(value: Any, world: ProgramWorld, *, dim: int, pad_index: int, pad_first: bool) -> Any:
    """Return a tree whose tensors are as long along `dim` as the longest of any worker."""
    lengths: list[int] = []
    mapped(value, lambda tensor: lengths.append(tensor.shape[dim] if tensor.dim() > dim else 0), other=_refuse)
    longest = iter([max(found) for found in zip(*world.everywhere(lengths), strict=True)])

    def padded(tensor: Tensor) -> Tensor:
        length = next(longest)
        if tensor.dim() <= dim or tensor.shape[dim] == length:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = length - shape[dim]
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    return mapped(value, padded)


def part_of_values(
    value: Sequence[Any] | Tensor | Mapping[str, Any], world: ProgramWorld, *, is_padded: bool = False
) -> Any:
    """Return this worker's part along dim 0: the first workers have one element more where nothing divides them.

    `is_padded`: all parts are as long, and the whole's last element fills them. Raises ValueError for a mapping whose
    values have different lengths.
    """
    if isinstance(value, Mapping):
        if len(lengths := sorted({len(one) for one in value.values()})) > 1:
            raise ValueError(
                f"split_between_processes() got a mapping of values with {lengths} elements: use equal ones"
            )
        return {key: part_of_values(one, world, is_padded=is_padded) for key, one in value.items()}
    each, more = divmod(len(value), world.size)
    begin = each * world.index + min(world.index, more)
    part = value[begin : begin + each + (world.index < more)]
    if not is_padded or len(part) == each + (more > 0):
        return part
    if isinstance(value, Tensor):
        return torch.cat([value[begin : begin + each], value[-1:]])
    return [*part, value[-1]]


def _refuse(value: Any) -> Any:
    raise TypeError(
        f"a {type(value).__name__} was to be exchanged between workers, and only tensors, in lists, tuples and "
        "dictionaries, are: use gather_for_metrics(..., use_gather_object=True) for objects"
    )
