"""Sets up a worker process right after the fork, runs its entry function, and ends the process.

The set-up makes a copy of the warm parent independent: own session, own log files, default signal handlers. The entry
is named in the request; it is called with this worker's `Assignment` and returns the exit status. An exception that
escapes from it is written to error.json, so that every failure is explained.
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
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline import clock
from paceline.end_mark import mark_end
from paceline.launch.fork import process_lifetime
from paceline.launch.fork.worker_locks import lock_worker_log
from paceline.plan.job import Assignment, assignment_from_json

__all__ = ["call_entry", "run_forked_worker"]

EXIT_FUNCTIONS_S = 5.0  # limit on a failed worker's exit functions, because the others wait until its end is known
FLUSH_FAILED = 120  # the exit status that Python itself uses


def run_forked_worker(
    request: Mapping[str, Any], *, channel_fd: int, snapshot_fds: Sequence[int], warm_pid: int, mask: Iterable[int]
) -> NoReturn:  # pyrefly: ignore[bad-return]  # it ends in `finally`
    """Run the worker that `request` describes, then end this process. Called in the child, right after the fork."""
    status = 1
    try:
        _become_independent(warm_pid, request["worker"], mask)
        for fd in snapshot_fds:
            os.set_inheritable(fd, False)
        assignment = dataclasses.replace(
            assignment_from_json(request["assignment"]), channel_fd=channel_fd, snapshot_fds=tuple(snapshot_fds)
        )
        status = _run_entry(assignment, request)
    except BaseException as error:  # the process boundary: the child must not return into the warm parent's code
        traceback.print_exc()
        _write_error(request, error)
    finally:
        _exit_process(status)


def call_entry(entry: str, assignment: Assignment) -> int:
    """Call the function named "module:name" and return the exit status, also if it calls `sys.exit`."""
    module, _, name = entry.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(assignment))
    except SystemExit as system_exit:
        if system_exit.code is None or isinstance(system_exit.code, int):
            return system_exit.code or 0
        print(system_exit.code, file=sys.stderr)
        return 1


def _become_independent(warm_pid: int, worker: int, mask: Iterable[int]) -> None:
    os.setsid()  # its own session and process group, so that Ctrl-C in the terminal reaches only the supervisor
    process_lifetime.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != warm_pid:
        os._exit(1)
    process_lifetime.set_process_name(f"paceline-w{worker}")
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_entry(assignment: Assignment, request: Mapping[str, Any]) -> int:
    _redirect_output(Path(assignment.worker_dir))
    lock_worker_log(Path(assignment.worker_dir))
    os.chdir(request["folder"])
    sys.path[:] = request["paths"]
    sys.argv[:] = request["argv"]
    return call_entry(request["entry"], assignment)


def _redirect_output(worker_dir: Path) -> None:
    """Make standard input empty, and send output and errors line by line to the worker's own log files."""
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, worker_dir / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, worker_dir / "stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]  # both are text files here


def _write_error(request: Mapping[str, Any], error: BaseException) -> None:
    worker_dir = Path(assignment_from_json(request["assignment"]).worker_dir)
    if (worker_dir / "error.json").exists():
        return  # the entry has already written a better explanation
    fields = {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "worker": request["worker"],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "step": 0,
        "time": clock.now(),
        "usage": False,
        "echo": False,
    }
    partial = worker_dir / f"error.json.{os.getpid()}"
    partial.write_text(json.dumps(fields), encoding="utf-8")
    partial.replace(worker_dir / "error.json")


def _exit_process(status: int) -> NoReturn:  # pyrefly: ignore[bad-return]  # the same
    """End as Python does (join threads, exit functions, flush), but run no C++ destructors, which may hang."""
    mark_end()
    try:
        if status == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does in the processes that it forks
        else:
            limit = threading.Timer(EXIT_FUNCTIONS_S, os._exit, (status,))
            limit.daemon = True
            limit.start()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # os._exit runs no exit functions
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the flush failed, for example on a full disk
        status = status or FLUSH_FAILED
    finally:
        os._exit(status & 0xFF)
