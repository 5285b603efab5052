"""When something that has failed may be tried again: each time after twice as long as before."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Retries"]

Key = TypeVar("Key", bound=Hashable)


class Retries(Generic[Key]):
    """Failures by what has failed. The first one is followed by `first_s` without a try, and none by more than
    `most_s`.
    """

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._failures: dict[Key, tuple[int, float]] = {}  # how many, and when it may be tried again

    def failed(self, key: Key) -> float:
        """Note a failure; returns the seconds in which it is not to be tried again."""
        count = self._failures.get(key, (0, 0.0))[0]
        wait_s = min(self._most_s, self._first_s * 2.0 ** min(count, 64))
        self._failures[key] = count + 1, time.monotonic() + wait_s
        return wait_s

    def is_due(self, key: Key) -> bool:
        """Whether it may be tried (again)."""
        return time.monotonic() >= self._failures.get(key, (0, -float("inf")))[1]

    def forget(self, key: Key) -> None:
        """It is well, or is about something else now."""
        self._failures.pop(key, None)
