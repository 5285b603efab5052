"""A long call that one worker makes in the background, while it keeps answering the others."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["POLL_S", "BackgroundCall", "poll_s"]

T = TypeVar("T")

POLL_S = 1.0  # how often a worker with a long call reports to the others that it is not done


def poll_s(timeout_s: float) -> float:
    """How long a worker may keep the others waiting for one such report, where `timeout_s` is their limit."""
    return min(POLL_S, timeout_s / 4)


class BackgroundCall(Generic[T]):
    """Calls a function in a thread of its own, which ends with the process at the latest."""

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._future = concurrent.futures.Future[T]()
        threading.Thread(target=self._call, args=(function,), name=name, daemon=True).start()

    def is_done(self, timeout_s: float) -> bool:
        """Wait so long at most; returns whether the function has ended."""
        return bool(concurrent.futures.wait([self._future], timeout_s).done)

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        return self._future.result()

    def _call(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:  # the thread's boundary: `result` raises it
            self._future.set_exception(error)
