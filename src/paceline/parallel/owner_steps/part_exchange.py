"""Moves parts of tensors to the worker that needs the whole, and back: one all-to-all along each axis of the split.

A parameter may be split twice: along a dim by tensor (or expert) parallelism, and each part by rows. Then its rows go
to one worker of each shard group first, which has a whole part, and these parts go to the owner. On the way back the
order is reversed. Bytes travel, so parameters and gradients of any types share an exchange.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import TensorSlice, rows_of

__all__ = ["PartExchange", "PartHop", "RowHop", "SliceHop", "SplitParameter", "TrafficTotals"]


class TrafficTotals(Protocol):
    """Where sent bytes and waiting are added up."""

    waited_s: float
    num_bytes_sent: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowHop:
    """A tensor is split by rows over a group."""

    axis: str
    group: WorkerGroup
    shape: tuple[int, ...]  # of what the rows make together

    def part(self, whole: Tensor, member: int) -> Tensor:
        """The part of a member, as a view."""
        first, stop = rows_of(self.shape[0], index=member, size=self.group.size)
        return whole[first:stop]

    def shape_of(self, member: int) -> tuple[int, ...]:
        """The shape of the part of a member."""
        first, stop = rows_of(self.shape[0], index=member, size=self.group.size)
        return (stop - first, *self.shape[1:])

    def put(self, whole: Tensor, part: Tensor, member: int) -> None:
        """Write a member's part to its place."""
        self.part(whole, member).copy_(part)


@dataclasses.dataclass(frozen=True, slots=True)
class SliceHop:
    """A tensor is split along a dim over a group, member k having `slices[k]`."""

    axis: str
    group: WorkerGroup
    shape: tuple[int, ...]
    slices: Sequence[TensorSlice]

    def part(self, whole: Tensor, member: int) -> Tensor:
        """The part of a member."""
        return self.slices[member].take(whole)

    def shape_of(self, member: int) -> tuple[int, ...]:
        """The shape of the part of a member."""
        cut = self.slices[member]
        held = sum(stop - first for first, stop in cut.ranges)
        return (*self.shape[: cut.dim], held, *self.shape[cut.dim + 1 :])

    def put(self, whole: Tensor, part: Tensor, member: int) -> None:
        """Write a member's part to its place."""
        cut = self.slices[member]
        pieces = part.split([stop - first for first, stop in cut.ranges], cut.dim)
        for (first, stop), piece in zip(cut.ranges, pieces, strict=True):
            whole.narrow(cut.dim, first, stop - first).copy_(piece)


PartHop = RowHop | SliceHop
PartForm = tuple[tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class SplitParameter:
    """How a parameter is split: `hops` from the parts to the whole, and the owner's index along each."""

    name: str
    hops: tuple[PartHop, ...]
    owner: tuple[int, ...]

    @property
    def is_own(self) -> bool:
        """Whether this worker is the owner."""
        return all(hop.group.index == at for hop, at in zip(self.hops, self.owner, strict=True))


class PartExchange:
    """Exchanges of some tensors, each like a parameter that is split. All workers of a replica make the same ones."""

    def __init__(self, traffic: TrafficTotals) -> None:
        self._traffic = traffic

    def gather(self, tensors: Sequence[tuple[SplitParameter, Tensor]]) -> list[Tensor | None]:
        """Return the wholes of those tensors that this worker owns, of which all workers pass their parts."""
        here: list[Tensor | None] = [tensor for _, tensor in tensors]
        for depth, group, chosen in _levels([of for of, _ in tensors]):
            held = [(place, tensors[place][0]) for place in chosen if here[place] is not None]
            sent: list[list[Tensor]] = [[] for _ in range(group.size)]
            for place, of in held:
                sent[of.owner[depth]].append(_given(here[place]))
            own = [(place, of) for place, of in held if of.owner[depth] == group.index]
            wholes = {place: _given(here[place]).new_empty(of.hops[depth].shape) for place, of in own}
            came = [[(of.hops[depth].shape_of(k), wholes[place].dtype) for place, of in own] for k in range(group.size)]
            first, axis = _given(here[held[0][0]]), held[0][1].hops[depth].axis
            received = self._swap(group, sent, came, first.device, f"parts for their owners along {axis}")
            for k, parts in enumerate(received):
                for (place, of), part in zip(own, parts, strict=True):
                    of.hops[depth].put(wholes[place], part, k)
            for place, _ in held:
                here[place] = wholes.get(place)
        return here

    def scatter(self, tensors: Sequence[tuple[SplitParameter, Tensor | None, Tensor]]) -> list[Tensor]:
        """Return this worker's parts of tensors whose owners pass the wholes.

        Each is (how it is split, the whole or None, a tensor with the shape and type of the part).
        """
        here = [whole for _, whole, _ in tensors]
        for depth, group, chosen in reversed(list(_levels([of for of, _, _ in tensors]))):
            by_owner: list[list[int]] = [[] for _ in range(group.size)]
            for place in chosen:
                by_owner[tensors[place][0].owner[depth]].append(place)
            sent = [
                [tensors[place][0].hops[depth].part(_given(here[place]), k) for place in by_owner[group.index]]
                for k in range(group.size)
            ]
            came = [
                [(tensors[place][0].hops[depth].shape_of(group.index), tensors[place][2].dtype) for place in places]
                for places in by_owner
            ]
            _, _, like = tensors[chosen[0]]
            axis = tensors[chosen[0]][0].hops[depth].axis
            received = self._swap(group, sent, came, like.device, f"parts from their owners along {axis}")
            for places, parts in zip(by_owner, received, strict=True):
                for place, part in zip(places, parts, strict=True):
                    here[place] = part
        return [_given(one) for one in here]

    def _swap(
        self,
        group: WorkerGroup,
        sent: Sequence[Sequence[Tensor]],
        like: Sequence[Sequence[PartForm]],
        device: torch.device,
        what: str,
    ) -> list[list[Tensor]]:
        """Send lists of tensors to each member, and return what came, in the shapes and types of `like`."""
        parts = [_bytes_of(one, device) for one in sent]
        out = [torch.empty(sum(map(_num_bytes, each)), dtype=torch.uint8, device=device) for each in like]
        began = time.perf_counter()
        group.all_to_all(parts, out, what=what)
        self._traffic.waited_s += time.perf_counter() - began
        self._traffic.num_bytes_sent += sum(one.nbytes for k, one in enumerate(parts) if k != group.index)
        return [list(_split_bytes(one, each)) for one, each in zip(out, like, strict=True)]


def _levels(split: Sequence[SplitParameter]) -> Iterator[tuple[int, WorkerGroup, list[int]]]:
    """Each depth of hops and each group at it, with the places of the parameters that go over it."""
    for depth in range(max((len(one.hops) for one in split), default=0)):
        groups: dict[int, tuple[WorkerGroup, list[int]]] = {}
        for place, one in enumerate(split):
            if depth < len(one.hops):
                group = one.hops[depth].group
                groups.setdefault(id(group), (group, []))[1].append(place)
        for group, places in groups.values():
            on_way = [place for place in places if _is_reached(split[place], depth)]
            if on_way:
                yield depth, group, on_way


def _is_reached(of: SplitParameter, depth: int) -> bool:
    """Whether this worker has something of a parameter after its first `depth` hops."""
    return all(hop.group.index == at for hop, at in zip(of.hops[:depth], of.owner[:depth], strict=True))


def _bytes_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    flat = [one.detach().contiguous().view(-1).view(torch.uint8) for one in tensors if one.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)


def _num_bytes(form: PartForm) -> int:
    return math.prod(form[0]) * form[1].itemsize


def _split_bytes(received: Tensor, like: Sequence[PartForm]) -> Iterator[Tensor]:
    for (shape, dtype), part in zip(like, received.split([_num_bytes(one) for one in like]), strict=True):
        # A copy where the place in the buffer does not fit the type.
        is_aligned = part.storage_offset() % dtype.itemsize == 0
        yield (part if is_aligned else part.clone()).view(dtype).view(shape)


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a worker has nothing of a parameter where it should have some: this is a bug of Paceline")
    return tensor
