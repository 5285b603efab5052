"""Wait for a number in memory that workers share: first looking for some microseconds, then asleep in the kernel.

Whoever waits looks fifty times a second whether those that it waits for are alive.
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
NUM_YIELDS = 20  # instead, where there are more workers than cores: the one that is awaited may need this very core
SLICE_S = 0.02  # asleep at a time


class FutexWaiter:
    """How one member of an arena waits. `is_lost`, asked meanwhile, may say who is dead, or raise what ends the wait.

    `ranks`: the members' worker ranks, by which messages name them. `num_neighbours`: how many workers the host has, of
    which the members may be some.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        ranks: Sequence[int],
        timeout_s: float,
        is_lost: Callable[[], str | None] | None,
        num_neighbours: int,
    ) -> None:
        self.ranks = tuple(ranks)
        self._arena, self._timeout_s, self._is_lost = arena, timeout_s, is_lost
        self._is_crowded = num_neighbours > len(os.sched_getaffinity(0))

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
        """Return when the number at `word`, which member `awaited` writes, has come to `sequence`.

        `asleep()` is called between two sleeps, for work that has become possible. Raises Disrupted where the member
        has ended or left, and SyncError with `overdue(seconds)` after the time limit.
        """
        control = self._arena.control
        if control[word] >= sequence or self._look(word, sequence):
            return
        began = time.monotonic()
        while (seen := control[word]) < sequence:
            if asleep is not None:
                asleep()
            self._arena.sleep(word, seen, SLICE_S)
            if control[word] >= sequence:
                return
            gone = dict(self._arena.gone())
            if awaited in gone and control[word] < sequence:  # it may have said so last of all
                who = f"worker {self.ranks[awaited]}"
                raise Disrupted(f"lost contact with a peer during {what}: {who} {gone[awaited]}")
            if self._is_lost is not None and (lost := self._is_lost()) is not None:
                raise Disrupted(f"lost contact with a peer during {what}: {lost}")
            if (waited_s := time.monotonic() - began) > self._timeout_s:
                raise SyncError(overdue(waited_s))

    def _look(self, word: int, sequence: int) -> bool:
        control = self._arena.control
        if not self._is_crowded:
            return any(control[word] >= sequence for _ in range(NUM_SPINS))
        for _ in range(NUM_YIELDS):
            os.sched_yield()
            if control[word] >= sequence:
                return True
        return False
