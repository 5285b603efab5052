"""Stands for `python` and `paceline` of a shell or a launcher: has them forked by the warm process, as their shadow.

The interpreter that runs this has loaded neither site nor packages: it is there in some ten milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

__all__ = ["main"]

STATUS = struct.Struct("i")  # as in `warm_source`


def main(words: Sequence[str], *, address: str, python: str, early: Mapping[str, str | None]) -> None:
    """Run `python words...` to its end, and end as it does.

    `address`: of the warm process. `early`: what it was loaded with; a command for which these variables have other
    values, or which is no script and no `-m paceline`, is started as it is.
    """
    words = words[1:] if words[:1] == ["-u"] else words  # torchrun's: the streams that tests look at are flushed
    can_fork = bool(words) and (words[0].endswith(".py") or list(words[:2]) == ["-m", "paceline"])
    if not can_fork or any(os.environ.get(name) != value for name, value in early.items()):
        os.execv(python, [python, *words])
    told, tells = os.pipe()
    life, _ = os.pipe()  # closed at this end by this process's death, which is the program's
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ), "own_session": False}
    data = json.dumps({**request, "host": None, "spaces_of": os.getpid()}).encode()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        socket.send_fds(sock, [struct.pack("I", len(data))], [0, 1, 2, tells, life])
        sock.sendall(data)
        os.close(tells)
        os.close(life)
        pid = _next(told)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda number, _: os.kill(pid, number))
    code = os.waitstatus_to_exitcode(_next(told))
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _next(told: int) -> int:
    found = os.read(told, STATUS.size)
    if len(found) < STATUS.size:
        raise RuntimeError("the process that programs are forked from has ended")
    return STATUS.unpack(found)[0]
