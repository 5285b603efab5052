"""Queues in buffers: which rows a micro-batch has written, and the queue with the rows of all of them, in order.

A *ring* has a pointer, an integer buffer of the same module: rows are written from it on, and it moves by their number,
modulo the length. A *shift* has none: old rows move towards one end, and new ones come in at the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["QueueForm", "find_queue", "merged_queue", "moved_pointer", "written_rows"]


@dataclasses.dataclass(frozen=True, slots=True)
class QueueForm:
    """How a queue is written: along which dim, and where; equal on all workers."""

    kind: Literal["ring", "append", "prepend"]
    dim: int
    pointer: str = ""  # the ring's: its name in the module
    rows: int = 0  # that a sample brings, or a micro-batch
    is_per_sample: bool = True


def find_queue(
    before: Tensor, after: Tensor, pointers: Mapping[str, tuple[Tensor, Tensor]]
) -> list[tuple[QueueForm, int]]:
    """All forms that what one micro-batch wrote may have, with the number of rows; `pointers`: integers of the module
    before and after."""
    found: list[tuple[QueueForm, int]] = []
    if before.shape != after.shape or not before.dim():
        return found
    for dim, length in enumerate(before.shape):
        written = (before != after).movedim(dim, 0).reshape(length, -1).any(1)
        if length < 2 or not bool(written.any()):
            continue
        for name, (old, new) in pointers.items():
            start, stop = int(old), int(new)
            if not (0 <= start < length and 0 <= stop < length):
                continue
            num = (stop - start) % length or length
            block = torch.zeros(length, dtype=torch.bool, device=written.device)
            block[_places(old, num, length, written.device)] = True
            if not bool((written & ~block).any()):
                found.append((QueueForm("ring", dim, name), num))
        found += _shifts(before.movedim(dim, 0), after.movedim(dim, 0), dim)
    return found


def _shifts(before: Tensor, after: Tensor, dim: int) -> list[tuple[QueueForm, int]]:
    found: list[tuple[QueueForm, int]] = []
    length = len(before)
    for num in range(1, length):
        if torch.equal(after[: length - num], before[num:]):
            found.append((QueueForm("append", dim), num))
            break
    for num in range(1, length):
        if torch.equal(after[num:], before[: length - num]):
            found.append((QueueForm("prepend", dim), num))
            break
    return found


def written_rows(form: QueueForm, after: Tensor, num: int, pointer: Tensor | None) -> Tensor:
    """The rows that a micro-batch wrote, first along dim 0; `pointer` as it was before."""
    rows = after.detach().movedim(form.dim, 0)
    if form.kind == "ring" and pointer is not None:
        return rows.index_select(0, _places(pointer, num, len(rows), rows.device))
    return (rows[len(rows) - num :] if form.kind == "append" else rows[:num]).clone()


def merged_queue(form: QueueForm, before: Tensor, blocks: Sequence[Tensor], pointer: Tensor | None) -> Tensor:
    """The queue after the blocks of rows of all micro-batches, one after another."""
    old = before.detach().movedim(form.dim, 0)
    length = len(old)
    if form.kind == "prepend":
        return torch.cat([*reversed(blocks), old])[:length].movedim(0, form.dim)
    rows = torch.cat(list(blocks))
    if form.kind == "append":
        return torch.cat([old, rows])[-length:].movedim(0, form.dim)
    if pointer is None:
        raise RuntimeError("a ring without its pointer")
    kept = rows[-length:]  # what would be written over is left out
    places = _places(pointer + (len(rows) - len(kept)), len(kept), length, old.device)
    return old.clone().index_copy_(0, places, kept).movedim(0, form.dim)


def moved_pointer(pointer: Tensor, num: int, length: int) -> Tensor:
    """The pointer after so many rows."""
    return (pointer + num) % length


def _places(pointer: Tensor, num: int, length: int, device: torch.device) -> Tensor:
    """`num` places from the pointer on; nothing waits for its value."""
    return (pointer.detach().reshape(()).to(device).long() + torch.arange(num, device=device)) % length
