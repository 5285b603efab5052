"""Short texts between the writers of one checkpoint: over the board, or, where the supervisor has gone, over files.

The board is the better carrier: it is there also where a disk is full. But it is the supervisor's, and workers whose
supervisor was killed save before they leave. Whoever finds the board gone writes down what it has said and others may
not have heard, and goes on with files in the run's directory, which the writers of one checkpoint share anyway. All
workers lose the board together, and all come there: who has nothing more to say has to look now and then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from paceline.comm.channel import ChannelClosed

__all__ = ["WritersMail"]

T = TypeVar("T")

NOT_HEARD = 2  # of the newest texts: of the save under way, and of the one before


class WritersMail:
    """One writer's mail. `prefix` is that of its keys in the store; `folder`, in which nothing else is, need not be
    there."""

    def __init__(self, store: dist.Store, *, prefix: str, folder: Path) -> None:
        self._store, self._prefix, self._folder = store, prefix, folder
        self._has_board = True
        self._said: dict[str, str] = {}  # the newest

    def put(self, name: str, text: str) -> None:
        """Leave a text under a name, in place of an earlier one; OSError where there are only files, and no room."""
        self._said[name] = text
        for old in list(self._said)[:-NOT_HEARD]:
            del self._said[old]
        self._on_board(lambda: self._store.set(self._key(name), text))
        if not self._has_board:
            self._write(name, text)

    def look(self, name: str) -> str | None:
        """Return what was put under a name; None: nothing yet."""
        key = self._key(name)
        found = self._on_board(lambda: self._store.get(key).decode() if self._store.check([key]) else None)
        if self._has_board:
            return found
        with contextlib.suppress(FileNotFoundError):
            return self._file(name).read_text(encoding="utf-8")
        return None

    def forget(self, name: str) -> None:
        """Drop what was put under a name, if anything was."""
        self._said.pop(name, None)
        self._on_board(lambda: self._store.delete_key(self._key(name)))
        if not self._has_board:
            self._file(name).unlink(missing_ok=True)

    def _on_board(self, ask: Callable[[], T]) -> T | None:
        """What the board answers, while it is there."""
        if self._has_board:
            try:
                return ask()
            except ChannelClosed:
                for name, text in self._said.items():
                    self._write(name, text)  # where there is no room, this is tried again
                self._has_board = False
        return None

    def _write(self, name: str, text: str) -> None:
        path = self._file(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # whoever looks finds all of it or nothing

    def _file(self, name: str) -> Path:
        return self._folder / name.replace("/", "_")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
