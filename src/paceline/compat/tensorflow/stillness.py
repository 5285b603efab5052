"""Whether a program stands still: it has used no processor, and written nothing, for a while."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["STILL_S", "Stillness"]

STILL_S = 60.0  # after so long that is worth a word; after --timeout-s, where that is shorter
IDLE_CORES = 0.05  # TensorFlow's own threads, which look after connections, use less


class Stillness:
    """Takes looks at a program; knows since when all of them were alike."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None  # the last look at which something had happened
        self._written: Hashable = None

    def take(self, now_s: float, *, cores: float, written: Hashable) -> float:
        """Return for how many seconds it has stood still, 0 below the limit.

        `cores`: that it has kept busy since the look before; `written`: anything that changes when it writes.
        """
        if self._since_s is None or cores >= IDLE_CORES or written != self._written:
            self._since_s, self._written = now_s, written
        still_s = now_s - self._since_s
        return still_s if still_s >= self._limit_s else 0.0
