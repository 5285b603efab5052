"""A forked worker's first and last steps: from a copy of the warm parent to a process of its own, and out of it.

Between them the program's entry runs: a function named in the request, called with this worker's `Assignment`, whose
result is the exit status. What escapes from it is written to error.json all the same, so that no end goes
unexplained.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.launch.fork import process_lifetime
from paceline.launch.fork.worker_locks import lock_worker_log
from paceline.plan.job import Assignment, assignment_from_json

__all__ = ["call_entry", "run_forked_worker"]

LEAVING_S = 5.0  # a failed worker's exit functions may take this long: the others wait for its end to be known
FLUSH_FAILED = 120  # the status that Python itself uses


def run_forked_worker(
    request: Mapping[str, Any], *, channel_fd: int, vault_fds: Sequence[int], warm_pid: int, mask: Iterable[int]
) -> NoReturn:
    """Be the worker that `request` describes, and end this process; called right after the fork, in the child."""
    status = 1
    try:
        _become_independent(warm_pid, request["worker"], mask)
        for fd in vault_fds:
            os.set_inheritable(fd, False)
        assignment = dataclasses.replace(
            assignment_from_json(request["assignment"]), channel_fd=channel_fd, vault_fds=tuple(vault_fds)
        )
        status = _work(assignment, request)
    except BaseException as error:  # the process boundary: nothing may go on into the warm parent's code
        traceback.print_exc()
        _write_error(request, error)
    finally:
        _leave(status)


def call_entry(entry: str, assignment: Assignment) -> int:
    """Call the function named "module:name" and return the exit status, also where it leaves by `sys.exit`."""
    module, _, name = entry.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(assignment))
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1


def _become_independent(warm_pid: int, worker: int, mask: Iterable[int]) -> None:
    os.setsid()  # a group and a session of its own: Ctrl-C in the terminal reaches only the supervisor
    process_lifetime.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != warm_pid:
        os._exit(1)
    process_lifetime.set_process_name(f"paceline-w{worker}")
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(assignment: Assignment, request: Mapping[str, Any]) -> int:
    _redirect(Path(assignment.worker_dir))
    lock_worker_log(Path(assignment.worker_dir))
    os.chdir(request["folder"])
    sys.path[:] = request["paths"]
    sys.argv[:] = request["argv"]
    return call_entry(request["entry"], assignment)


def _redirect(worker_dir: Path) -> None:
    """Nothing to read on standard input; what is written goes to the worker's own files, each line at once."""
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, worker_dir / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, worker_dir / "stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]  # both are files by now


def _write_error(request: Mapping[str, Any], error: BaseException) -> None:
    worker_dir = Path(assignment_from_json(request["assignment"]).worker_dir)
    if (worker_dir / "error.json").exists():
        return  # it was explained where it happened
    fields = {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "worker": request["worker"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": 0,
        "time": time.time(),
        "usage": False,
        "echo": False,
    }
    partial = worker_dir / f"error.json.{os.getpid()}"
    partial.write_text(json.dumps(fields), encoding="utf-8")
    partial.replace(worker_dir / "error.json")


def _leave(status: int) -> NoReturn:
    """Do what Python does at its end (join threads, exit functions, flush), but leave C++ destructors alone."""
    try:
        if status == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in the processes that it forks
        else:
            limit = threading.Timer(LEAVING_S, os._exit, (status,))
            limit.daemon = True
            limit.start()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # a forked child ends by os._exit, which runs none
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # of the flush: the disk is full
        status = status or FLUSH_FAILED
    finally:
        os._exit(status & 0xFF)
