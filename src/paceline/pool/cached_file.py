"""A file of a pool that is looked at again and again, and read only where it has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["CachedFile"]

Content = TypeVar("Content")
Stamp = tuple[int, int, int]  # time of the last change in ns, size, inode


class CachedFile(Generic[Content]):
    """The content of `path` as `load` returns it, which is called again where the file's stamp has changed.

    For files that are replaced by others and written again soon: two changes within one tick of the disk's clock, of
    the same size, may be seen as one until the next change. The content is shared by all readers of this object, which
    do not change it.
    """

    def __init__(self, path: Path, load: Callable[[], Content]) -> None:
        self._path, self._load = path, load
        self._last: tuple[Stamp | None, Content] | None = None

    def read(self) -> Content:
        """Return the content; raises OSError, and what `load` raises, then also the next time."""
        stamp = self._stamp()  # before it is read: a change meanwhile is found the next time
        if self._last is None or self._last[0] != stamp:
            self._last = None
            self._last = stamp, self._load()
        return self._last[1]

    def _stamp(self) -> Stamp | None:
        """None where there is no such file."""
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return None
        return now.st_mtime_ns, now.st_size, now.st_ino
