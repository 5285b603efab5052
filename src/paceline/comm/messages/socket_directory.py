"""Directories of the sockets by which processes of one host reach each other; removed also after a SIGKILL.

Each is named after the family of processes that one warm parent has forked, and is removed by its owner. What owners
that were killed have left, the warm parent and its supervisor remove once the family has ended.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from paceline import environment

__all__ = ["make_socket_directory", "remove_socket_directories"]


def make_socket_directory() -> Path:
    """Make a directory for this process's socket, which no other user of the host can enter (0700)."""
    return Path(tempfile.mkdtemp(prefix=_prefix(environment.family() or "")))


def remove_socket_directories(family: str) -> None:
    """Remove what a family has left: all its processes have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix(family)}*") if family else ():
        shutil.rmtree(path, ignore_errors=True)


def _prefix(family: str) -> str:
    return f"paceline-{family}-" if family else "paceline-"
