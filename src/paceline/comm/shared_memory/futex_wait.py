"""Waits for a counter in shared memory: first spinning for some microseconds, then asleep in the kernel (futex).

Fifty times a second, a waiting worker checks whether the workers that it waits for are alive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from paceline.comm.group import Disrupted
from paceline.comm.shared_memory.arena import Arena
from paceline.errors import SyncError

__all__ = ["FutexWaiter"]

NUM_SPINS = 700  # before going to sleep: some 50 us
NUM_YIELDS = 20  # instead of spinning, if there are more workers than cores: the awaited one may need this core
SLICE_S = 0.02  # asleep at a time


class FutexWaiter:
    """Waits on behalf of one member of an arena.

    `check_peers()` is called while waiting: it returns a text that names a lost worker, or raises to end the wait.
    `ranks` are the members' worker ranks, for messages. `num_local_workers` is the number of workers on this host,
    which may be more than the members.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        ranks: Sequence[int],
        timeout_s: float,
        check_peers: Callable[[], str | None] | None,
        num_local_workers: int,
    ) -> None:
        self.ranks = tuple(ranks)
        self._arena, self._timeout_s, self._is_lost = arena, timeout_s, check_peers
        self._is_crowded = num_local_workers > len(os.sched_getaffinity(0))

    def until(
        self,
        word: int,
        sequence: int,
        *,
        awaited: int,
        what: str,
        overdue: Callable[[float], str],
        asleep: Callable[[], object] | None = None,
    ) -> None:
        """Return when the counter at `word`, which member `awaited` writes, has reached `sequence`.

        `asleep()` is called between two sleeps, for work that has become possible. Raises Disrupted if the member
        has ended or left the group, and SyncError with the text `overdue(seconds)` after the time limit.
        """
        control = self._arena.control
        if control[word] >= sequence or self._spin(word, sequence):
            return
        began = time.monotonic()
        while (seen := control[word]) < sequence:
            if asleep is not None:
                asleep()
            self._arena.wait_for_change(word, seen, SLICE_S)
            if control[word] >= sequence:
                return
            ended = dict(self._arena.ended_members())
            if awaited in ended and control[word] < sequence:  # its last announcement may be the awaited one
                worker = f"worker {self.ranks[awaited]}"
                raise Disrupted(f"lost contact with a peer during {what}: {worker} {ended[awaited]}")
            if self._is_lost is not None and (lost := self._is_lost()) is not None:
                raise Disrupted(f"lost contact with a peer during {what}: {lost}")
            if (waited_s := time.monotonic() - began) > self._timeout_s:
                raise SyncError(overdue(waited_s))

    def _spin(self, word: int, sequence: int) -> bool:
        control = self._arena.control
        if not self._is_crowded:
            return any(control[word] >= sequence for _ in range(NUM_SPINS))
        for _ in range(NUM_YIELDS):
            os.sched_yield()
            if control[word] >= sequence:
                return True
        return False
