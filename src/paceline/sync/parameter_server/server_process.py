"""The process that a server is: forked by a worker, with its model and optimizers as they are at that moment.

So a server needs no description of an optimizer, of whatever class, and begins with what a checkpoint has filled. It is
cut off from the worker at once: it has a session of its own and none of the worker's connections, so it outlives the
worker, and nobody who waits for the worker's end waits for it. It ends when all workers have gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.comm.messages.tensor_messages import Secret, TensorServer
from paceline.sync.parameter_server.server import ServerFactory, ServerParameters

__all__ = ["end_server", "fork_server", "is_stopped", "reaped"]

NAME = "paceline-server"  # of the process, where a system has such names
POLL_S = 0.005
BEGIN_S = 60.0  # from the fork until it can be reached
ALONE_S = 60.0  # without any caller, where the worker that forked it has gone


def fork_server(
    make: Callable[[], ServerParameters],
    *,
    address: str,
    secret: Secret,
    server: ServerFactory,
    silence_s: float | None = None,
) -> tuple[int, str]:
    """Return the process number and the endpoint of a `server` that holds what `make()` gives in it.

    `silence_s` is that of its `TensorServer`. Raises RuntimeError where it does not begin.
    """
    ours, theirs = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forks beside threads. They are not in the child, and of what they may have locked it uses
        # nothing: as with torch's own loaders, which are forked at the same places.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(ours)
        _be(
            make,
            address=address,
            secret=secret,
            server=server,
            silence_s=silence_s,
            tell=theirs,
            parent=parent,
        )
    os.close(theirs)
    endpoint = _told(ours, pid)
    if not endpoint:
        raise RuntimeError(f"the parameter server (pid {pid}) could not begin: this worker's stderr.log says why")
    return pid, endpoint


def is_stopped(pid: int) -> bool:
    """Whether a process of this host stands still: SIGSTOP, or a debugger. False where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # it has gone, or this is no Linux
        return False


def end_server(pid: int) -> None:
    """Kill a server of this host, whoever started it; nothing happens where it is not known that it is one."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
            os.kill(pid, signal.SIGKILL)


def reaped(pid: int, *, within_s: float) -> str:
    """Wait for the end of a child; returns "killed by signal 9" or "ended with status 1", "" where it does not end."""
    deadline = time.monotonic() + within_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_S)  # a child that has left its parent's session tells nobody but waitpid


def _told(ours: int, pid: int) -> str:
    """The endpoint that a server tells, or nothing where it has ended; one that says nothing is ended."""
    with os.fdopen(ours, "rb", buffering=0) as said:
        poll = select.poll()
        poll.register(said, select.POLLIN)
        if poll.poll(BEGIN_S * 1000):
            return said.readline().decode().strip()  # it is written at once
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError(f"the parameter server (pid {pid}) did not begin within {BEGIN_S:.0f} s, and was killed")


def _be(
    make: Callable[[], ServerParameters],
    *,
    address: str,
    secret: Secret,
    server: ServerFactory,
    silence_s: float | None,
    tell: int,
    parent: int,
) -> None:
    """Serve, and end the process."""
    status = 1
    try:
        os.setsid()
        tell = _cut_off(keeping=tell)
        for signum in (signal.SIGTERM, signal.SIGINT):  # which may come to all of a job: workers save, and need it
            signal.signal(signum, signal.SIG_IGN)
        torch.set_num_threads(1)  # those of the worker's pool are not here
        torch.set_grad_enabled(True)
        if sys.platform == "linux":
            Path("/proc/self/comm").write_text(NAME)
        with contextlib.closing(
            TensorServer(address, secret, silence_s=silence_s)
        ) as listener:  # what was said last arrives, after a failure too
            part = make()
            os.write(tell, f"{listener.endpoint}\n".encode())
            os.close(tell)
            alone_until = time.monotonic() + ALONE_S
            server(
                part, listener, is_deserted=lambda: os.getppid() != parent and time.monotonic() > alone_until
            ).serve()
        status = 0
    except BaseException:  # the process's boundary: in the worker's stderr.log; callers were told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _cut_off(*, keeping: int) -> int:
    """Put nothing in the place of every open file but the standard ones and `keeping`, whose new number is returned.

    Closed numbers would be given to other files, which objects of the worker's might close later.
    """
    kept = os.dup(keeping)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        number = int(name)
        if number > 2 and number not in (kept, nothing):
            try:
                os.dup2(nothing, number)
            except OSError:  # the listing's own, closed meanwhile
                continue
    return kept
