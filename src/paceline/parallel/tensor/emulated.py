"""The workers of a group, emulated by threads of one process: what a plan does can be tried before anything starts.

Each thread runs the same function as one worker; a collective waits until all have come to it. Nothing is copied, so
that tensors of others must not be changed in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from paceline.parallel.tensor.collectives import Traffic

__all__ = ["EmulatedGroup", "emulate"]

T = TypeVar("T")
LIMIT_S = 120.0


class EmulatedGroup:
    """One thread's end of a group of threads."""

    def __init__(self, index: int, barrier: threading.Barrier, board: list[list[Tensor]]) -> None:
        self.index, self.size = index, barrier.parties
        self.traffic = Traffic()
        self._barrier, self._board = barrier, board

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._note("all_reduce", tensor)
        return torch.stack([one for [one] in self._exchange([tensor])]).sum(0)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [one for [one] in self._exchange([tensor])]
        self._note("all_gather", *parts)
        return parts

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        self._note("reduce_scatter", *parts)
        return torch.stack([theirs[self.index] for theirs in self._exchange(parts)]).sum(0)

    def _exchange(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        self._board[self.index] = tensors
        self._barrier.wait(LIMIT_S)
        everybody = list(self._board)
        self._barrier.wait(LIMIT_S)
        return everybody

    def _note(self, kind: str, *tensors: Tensor) -> None:
        self.traffic.note(kind, sum(one.numel() * one.element_size() for one in tensors))


def emulate(size: int, work: Callable[[EmulatedGroup], T]) -> list[T]:
    """Return what `work(group)` returned as each of `size` workers; the first worker's own error is raised."""
    barrier = threading.Barrier(size)
    board: list[list[Tensor]] = [[] for _ in range(size)]
    values: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            values[index] = work(EmulatedGroup(index, barrier, board))
        except BaseException as error:  # the thread's boundary: raised again below
            errors[index] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors.values() if not isinstance(error, threading.BrokenBarrierError)]
    for error in [*own, *errors.values()]:
        raise error
    return [values[index] for index in range(size)]
