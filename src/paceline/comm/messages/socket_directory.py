"""Directories of the sockets by which processes of one host reach each other; removed also after a SIGKILL.

Each is named after the family of processes that one warm parent has forked, and is removed by its owner. What owners
that were killed have left, the warm parent and its supervisor remove once the family has ended. Where these were
killed, too, the next family of the same user does.

The path of a socket has at most 107 bytes. Where the temporary directory is too long for that, /tmp is taken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from paceline import environment

__all__ = ["make_socket_directory", "remove_socket_directories"]

LONGEST = 107  # bytes of a socket's path, without the zero at its end
SOCKET = "s"
ABANDONED_S = 60.0  # a socket that was just made may not listen yet
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
        _remove_abandoned(Path(_place(prefix)))


def _remove_abandoned(place: Path) -> None:
    """Remove what families have left that were killed as a whole."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=place) as new:
        now = os.fstat(new.fileno()).st_mtime  # by the clock that the other times are from
        for path in place.glob("paceline-*-*"):
            with contextlib.suppress(OSError):  # its owner removes it at this moment
                if _is_abandoned(path, now):
                    shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(directory: Path, now: float) -> bool:
    """Whether a directory of this user has nothing but a socket, old enough, at which nobody listens any more."""
    found = directory.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or now - found.st_mtime < ABANDONED_S or os.listdir(directory) != [SOCKET]:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.setblocking(False)
        return knock.connect_ex(str(directory / SOCKET)) == errno.ECONNREFUSED


def _place(prefix: str) -> str:
    """Return the directory in which those of this prefix are made."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + len(prefix) + REST <= LONGEST else "/tmp"


def _prefix(family: str) -> str:
    return f"paceline-{family}-" if family else "paceline-"
