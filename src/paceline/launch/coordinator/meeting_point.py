"""How hosts that share the run's directory find each other there, without an address: `--head auto`.

The first host that gets the lock on `RUN/.meeting.lock` becomes the coordinator: it listens at a free port and writes
its address to `RUN/meeting.json`, where the others read it. The kernel frees the lock with its holder, so a host that
ends before all have met leaves the place to another one. Once the run goes on, `RUN/head.json` says who leads it
(`paceline.launch.coordinator.head_register`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline import environment
from paceline.errors import LaunchError, writing
from paceline.plain_data import read_object, text_of
from paceline.plan.job import AUTO
from paceline.private_files import make_run_directory, replace_private
from paceline.regular_files import read_regular

__all__ = ["MeetingPoint", "own_address"]

NAME, LOCK = "meeting.json", ".meeting.lock"
MOST_BYTES = 1 << 12
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid (0: the open file owns the lock)
ELSEWHERE = ("192.0.2.1", 9)  # of RFC 5737, nobody's: connecting a datagram socket sends nothing
LOOPBACK = "127.0.0.1"


class MeetingPoint:
    """The meeting point in one run directory; its creator closes it when the run has ended on this host."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = Path(run_dir)
        self._lock: int | None = None

    def listen(self) -> socket.socket | None:
        """Become the coordinator, if nobody is: return a listening socket whose address the others can read."""
        if not self._hold():
            return None
        address = own_address()
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((address, 0))
            sock.listen()
            with writing(self._run_dir):
                replace_private(self._run_dir / NAME, json.dumps({"address": _point(sock)}).encode())
        except BaseException:
            sock.close()
            raise
        return sock

    def address(self) -> str | None:
        """Return HOST:PORT of the coordinator, which may be gone; None where none has come yet."""
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
            return text_of(read_object(read_regular(self._run_dir / NAME, MOST_BYTES))["address"])
        return None

    def close(self) -> None:
        """Leave the place to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> bool:
        if self._lock is not None:
            return True
        if sys.platform != "linux":
            raise LaunchError(f"head={AUTO!r} needs locks of open files, which are Linux's: name a host, HOST:PORT.")
        with writing(self._run_dir):
            make_run_directory(self._run_dir)
            file = os.open(self._run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as error:
            os.close(file)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise LaunchError(
                f"head={AUTO!r} has the hosts meet in {self._run_dir}, whose file system has no locks "
                f"({error.strerror}): use a run directory on another disk, or name a host, HOST:PORT."
            ) from error
        self._lock = file
        return True


def own_address() -> str:
    """Return the address at which other hosts reach this one: that of its name, or of its route to other networks;
    127.0.0.1 where it has none."""
    for name in (*environment.own_names(), socket.gethostname()):
        for address in _addresses_of(name):
            if not address.startswith("127.") and address != "::1" and _is_own(address):
                return address
    for family, elsewhere in ((socket.AF_INET, ELSEWHERE), (socket.AF_INET6, ("2001:db8::1", 9))):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(elsewhere)
            return str(sock.getsockname()[0])
    return LOOPBACK


def _addresses_of(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        yield from (str(address[0]) for *_, address in sorted(found, key=lambda one: one[0] != socket.AF_INET))


def _is_own(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError:
        return False
    return True


def _point(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
