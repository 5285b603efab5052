"""Directories of the sockets by which processes of one host reach each other; removed also after a SIGKILL.

Each is named after the family of processes that one warm parent has forked, and is removed by its owner. What owners
that were killed have left, the warm parent and its supervisor remove once the family has ended.

The path of a socket has at most 107 bytes. Where the temporary directory is too long for that, /tmp is taken.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from paceline import environment

__all__ = ["make_socket_directory", "remove_socket_directories"]

LONGEST = 107  # bytes of a socket's path, without the zero at its end
REST = len("/") + 8 + len("/s")  # what mkdtemp adds, and the socket's own name


def make_socket_directory() -> Path:
    """Make a directory for this process's socket, which no other user of the host can enter (0700)."""
    prefix = _prefix(environment.family() or "")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_place(prefix)))


def remove_socket_directories(family: str) -> None:
    """Remove what a family has left: all its processes have ended."""
    if family:
        prefix = _prefix(family)
        for path in Path(_place(prefix)).glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def _place(prefix: str) -> str:
    """Return the directory in which those of this prefix are made."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + len(prefix) + REST <= LONGEST else "/tmp"


def _prefix(family: str) -> str:
    return f"paceline-{family}-" if family else "paceline-"
