"""Whether a worker process has come to its end by itself: a byte of memory that it shares with the process that forked
it. An exit status alone does not say so: os._exit(0) ends a process with 0 in the middle of its work.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["EndMark", "mark_end"]

_held: tuple[int, EndMark] | None = None  # this worker's pid and mark


class EndMark:
    """Made before the fork. The worker holds it, and sets it by `mark_end`; the process that forked it reads it."""

    def __init__(self) -> None:
        """Raise OSError if there is no memory for it."""
        self._memory = mmap.mmap(-1, 1)

    def hold(self) -> None:
        """In the worker: `mark_end` sets this one."""
        global _held
        _held = os.getpid(), self

    @property
    def is_set(self) -> bool:
        return self._memory[0] != 0

    def set(self) -> None:
        self._memory[0] = 1

    def close(self) -> None:
        self._memory.close()


def mark_end() -> None:
    """This worker's function has returned, or it leaves in good order: whatever ends the process now, its exit status
    counts. Nothing happens in a process that is no forked worker, such as a child of one.
    """
    if _held is not None and _held[0] == os.getpid():
        _held[1].set()
