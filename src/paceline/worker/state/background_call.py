"""A long look that one worker takes beside what it does together with the others."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["POLL_S", "BackgroundCall", "poll_s"]

T = TypeVar("T")

POLL_S = 1.0  # a worker with something long to do beside the others tells them so often that it is not done


def poll_s(timeout_s: float) -> float:
    """How long a worker may keep the others waiting for one such word, where they wait `timeout_s` for anything."""
    return min(POLL_S, timeout_s / 4)


class BackgroundCall(Generic[T]):
    """Calls a function in a thread of its own, which ends with the process at the latest."""

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._future = concurrent.futures.Future[T]()
        threading.Thread(target=self._call, args=(function,), name=name, daemon=True).start()

    def is_done(self, timeout_s: float) -> bool:
        """Wait so long at most; returns whether the function has come to its end."""
        return bool(concurrent.futures.wait([self._future], timeout_s).done)

    def result(self) -> T:
        """What the function has returned; what it has raised is raised."""
        return self._future.result()

    def _call(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:  # the thread's boundary: `result` raises it
            self._future.set_exception(error)
