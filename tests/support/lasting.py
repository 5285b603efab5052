"""Folders for what several tests look at: they stay as long as the session, and go with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

__all__ = ["folder", "folders", "remove_all"]

_made: list[Path] = []


def folder(name: str) -> Path:
    """A new folder, with `name` in its own."""
    _made.append(Path(tempfile.mkdtemp(prefix=f"paceline-{name}-")))
    return _made[-1]


def folders() -> frozenset[Path]:
    """Those that are there now."""
    return frozenset(_made)


def remove_all() -> None:
    """The session is over."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)
