"""A process group emulated by threads of one process, so that a plan can be tried before anything starts.

Each thread runs the same function as one worker; a collective waits until all threads have reached it. Tensors are
handed over without a copy, so a tensor of another worker must not be changed in place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paceline.parallel.tensor.collectives import TrafficCounter

__all__ = ["EmulatedGroup", "emulate", "emulate_grid"]

T = TypeVar("T")
LIMIT_S = 120.0
END_S = 5.0  # how long a joined thread may take to disappear from the system


class EmulatedGroup:
    """One thread's end of a group of threads."""

    def __init__(self, index: int, barrier: threading.Barrier, slots: list[list[Tensor]]) -> None:
        self.index, self.size = index, barrier.parties
        self.traffic = TrafficCounter()
        self._barrier, self._slots = barrier, slots

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
        self._slots[self.index] = tensors
        self._barrier.wait(LIMIT_S)
        every_worker = list(self._slots)
        self._barrier.wait(LIMIT_S)
        return every_worker

    def _note(self, kind: str, *tensors: Tensor) -> None:
        self.traffic.note(kind, sum(one.numel() * one.element_size() for one in tensors))


def emulate(size: int, work: Callable[[EmulatedGroup], T]) -> list[T]:
    """Return what `work(group)` returned for each of `size` workers; raises the first worker's own error."""
    return [value for [value] in emulate_grid(size, 1, lambda group, _: work(group))]


def emulate_grid(rows: int, columns: int, work: Callable[[EmulatedGroup, EmulatedGroup], T]) -> list[list[T]]:
    """Return what `work(group of its column, group of its row)` returned for each of `rows` x `columns` workers, by
    row.

    Raises the first worker's own error.
    """
    down = [_barrier_and_slots(rows) for _ in range(columns)]
    across = [_barrier_and_slots(columns) for _ in range(rows)]
    values: dict[tuple[int, int], T] = {}
    errors: dict[tuple[int, int], BaseException] = {}

    def run(row: int, column: int) -> None:
        try:
            values[row, column] = work(EmulatedGroup(row, *down[column]), EmulatedGroup(column, *across[row]))
        except BaseException as error:  # the thread's boundary: raised again below
            errors[row, column] = error
            for barrier, _ in (*down, *across):
                barrier.abort()

    places = [(row, column) for row in range(rows) for column in range(columns)]
    threads = [threading.Thread(target=run, args=place, daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        _await_end(thread)
    own = [error for error in errors.values() if not isinstance(error, threading.BrokenBarrierError)]
    for error in [*own, *errors.values()]:
        raise error
    return [[values[row, column] for column in range(columns)] for row in range(rows)]


def _await_end(thread: threading.Thread) -> None:
    """Return when a joined thread has left the system.

    Until then libraries may be freeing their per-thread buffers behind locks, as MKL does. A process forked meanwhile
    (a data loader, for example) would wait for such a lock for ever in its first matrix product.
    """
    task, deadline = Path("/proc/self/task", str(thread.native_id)), time.monotonic() + END_S
    while task.exists() and time.monotonic() < deadline:
        time.sleep(0.0002)  # the system gives no notice


def _barrier_and_slots(size: int) -> tuple[threading.Barrier, list[list[Tensor]]]:
    """Return a barrier for `size` threads and one slot per thread for the tensors that it shows the others."""
    return threading.Barrier(size), [[] for _ in range(size)]
