"""The process of a parameter server: forked by a worker, with its model and optimizers as they are at that moment.

So a server needs no description of an optimizer of any class, and begins with the state that a checkpoint has filled.
It is detached from the worker at once: it has a session of its own and none of the worker's connections. So it outlives
the worker, and a process that waits for the worker's end does not wait for the server. It ends when all workers have
disconnected.
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
from paceline.processes import exit_text, how_ended
from paceline.sync.parameter_server.served_parameters import ServerParameters
from paceline.sync.parameter_server.server import ServerFactory

__all__ = ["end_server", "end_text", "fork_server", "reaped"]

NAME = "paceline-server"  # of the process, on systems with process names
POLL_S = 0.005
BEGIN_S = 60.0  # from the fork until it can be reached
ALONE_S = 60.0  # without any client, if the worker that forked it has ended


def fork_server(
    make: Callable[[], ServerParameters],
    *,
    address: str,
    secret: Secret,
    server: ServerFactory,
    silence_s: float | None = None,
) -> tuple[int, str]:
    """Return the process id and the endpoint of a `server` that holds the result of `make()`, called in its process.

    `silence_s`: as for `TensorServer`. Raises RuntimeError if the process does not begin to serve.
    """
    ours, theirs = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forks beside threads. The child has none of them, and uses nothing that they may have locked,
        # as torch's own data loader workers, which are forked at the same places.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(ours)
        _serve_in_child(
            make,
            address=address,
            secret=secret,
            server=server,
            silence_s=silence_s,
            report_fd=theirs,
            parent=parent,
        )
    os.close(theirs)
    endpoint = _read_endpoint(ours, pid)
    if not endpoint:
        raise RuntimeError(f"the parameter server (pid {pid}) could not begin: this worker's stderr.log says why")
    return pid, endpoint


def end_server(pid: int) -> None:
    """Kill a server of this host, whichever process started it; do nothing if the process is not known to be one."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == NAME:
            os.kill(pid, signal.SIGKILL)


def end_text(pid: int) -> str:
    """Return how a server of this host has ended, whichever process started it, as long as that has not reaped it;
    else ""."""
    return how_ended(pid, NAME)


def reaped(pid: int, *, within_s: float) -> str:
    """Wait for the end of a child; return "killed by signal 9" or "ended with status 1"; "" if it does not end."""
    deadline = time.monotonic() + within_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return exit_text(os.waitstatus_to_exitcode(status))
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_S)  # the end of a child in another session shows only in waitpid


def _read_endpoint(ours: int, pid: int) -> str:
    """Return the endpoint that a server reports; "" if it has ended. A server that reports nothing is killed."""
    with os.fdopen(ours, "rb", buffering=0) as said:
        poll = select.poll()
        poll.register(said, select.POLLIN)
        if poll.poll(BEGIN_S * 1000):
            return said.readline().decode().strip()  # it is written at once
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise RuntimeError(f"the parameter server (pid {pid}) did not begin within {BEGIN_S:.0f} s, and was killed")


def _serve_in_child(
    make: Callable[[], ServerParameters],
    *,
    address: str,
    secret: Secret,
    server: ServerFactory,
    silence_s: float | None,
    report_fd: int,
    parent: int,
) -> None:
    """Serve, and end the process."""
    status = 1
    try:
        os.setsid()
        report_fd = _cut_off(keeping=report_fd)
        for signum in (signal.SIGTERM, signal.SIGINT):  # sent to a whole job, whose workers still save, and need it
            signal.signal(signum, signal.SIG_IGN)
        torch.set_num_threads(1)  # the threads of the worker's pool are not in this process
        torch.set_grad_enabled(True)
        if sys.platform == "linux":
            Path("/proc/self/comm").write_text(NAME)
        # Closing it delivers the last messages, after a failure too.
        with contextlib.closing(TensorServer(address, secret, silence_s=silence_s)) as listener:
            part = make()
            os.write(report_fd, f"{listener.endpoint}\n".encode())
            os.close(report_fd)
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
    """Replace every open file by /dev/null, except the standard ones and `keeping`; return its new descriptor.

    Closed descriptors would be given to other files, which objects of the worker might close later.
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
