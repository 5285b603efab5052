"""Directories of the sockets by which processes of one host reach each other; removed also after a SIGKILL.

Each is named after the family of processes that one warm parent has forked, and is removed by its owner. What owners
that were killed have left, the warm parent and its supervisor remove once the family has ended. Where these were
killed, too, the next family of the same user does.

The path of a socket has at most 107 bytes. Where the temporary directory is too long for that, /tmp is taken.

Loader processes pass on micro-batches through sockets of Python's multiprocessing, each in a directory of its own that
it removes at its end. A loader that is killed does not come to that, and loaders are killed with their worker. So the
loaders of a worker have one directory together, which is of this kind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import stat
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

from paceline import environment

__all__ = ["loader_directory", "make_socket_directory", "remove_socket_directories"]

LONGEST = 107  # bytes of a socket's path, without the zero at its end
SOCKET = "s"
OF_LOADERS = "listener-"  # what multiprocessing calls its sockets, with 8 characters more
ABANDONED_S = 60.0  # a socket that was just made may not listen yet
REST = len("/") + 8 + len(f"/{OF_LOADERS}") + 8  # what mkdtemp adds, and the longest name of a socket


def make_socket_directory() -> Path:
    """Make a directory for this process's socket, which no other user of the host can enter (0700)."""
    prefix = _prefix(environment.family() or "")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_place(prefix)))


@functools.cache
def _loader_directory(pid: int) -> tuple[Path, socket.socket]:
    made = make_socket_directory()
    Finalize(None, _remove, (made,), exitpriority=0)  # of this process, not of forks
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # as long as it listens, the directory is in use
    sock.bind(str(made / SOCKET))
    sock.listen(1)
    return made, sock


def loader_directory() -> Path:
    """Return the directory for the sockets of this process's loaders, the same each time."""
    return _loader_directory(os.getpid())[0]


def remove_socket_directories(family: str) -> None:
    """Remove what a family has left: all its processes have ended."""
    if family:
        prefix = _prefix(family)
        place = Path(_place(prefix))
        with contextlib.suppress(OSError):
            _remove_abandoned(place, prefix)
        for path in place.glob(f"{prefix}*"):
            _remove(path)


def _remove_abandoned(place: Path, prefix: str) -> None:
    """Remove what families have left that were killed as a whole. What this makes for that is of its own family, so
    that after a kill in the midst the rest of the family removes it."""
    new = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    now = new.lstat().st_mtime  # by the clock that the other times are from
    for path in place.glob("paceline-*"):
        with contextlib.suppress(OSError):  # its owner removes it at this moment
            if _is_abandoned(path, now):
                _remove(path)


def _is_abandoned(directory: Path, now: float) -> bool:
    """Whether a directory of this user has nothing but sockets, old enough, and at its owner's nobody listens any
    more."""
    if not _is_own(directory) or now - directory.lstat().st_mtime < ABANDONED_S:
        return False
    names = os.listdir(directory)
    if SOCKET not in names or not all(name == SOCKET or name.startswith(OF_LOADERS) for name in names):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.setblocking(False)
        return knock.connect_ex(str(directory / SOCKET)) == errno.ECONNREFUSED


def _remove(directory: Path) -> None:
    """Remove a directory of this user and the files in it. One of another user, who can read a family's name in /tmp,
    is left alone, however it is called and whatever it holds."""
    with contextlib.suppress(OSError):
        if _is_own(directory):
            for path in directory.iterdir():
                path.unlink(missing_ok=True)
            directory.rmdir()


def _is_own(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _place(prefix: str) -> str:
    """Return the directory in which those of this prefix are made."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + len(prefix) + REST <= LONGEST else "/tmp"


def _prefix(family: str) -> str:
    return f"paceline-{family}-" if family else "paceline-"
