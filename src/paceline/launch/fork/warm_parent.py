"""The warm parent: a process that has imported torch once, and forks the workers.

The supervisor starts it as a fresh interpreter (`paceline.launch.fork.warm_parent_client` holds the other end), and it
does nothing but what the supervisor asks for over one inherited socket:

    <- {"op": "ready", "threads": [], ...}                 or {"op": "failed", ...}: an import went wrong
    -> {"op": "fork", "worker": k, "assignment": ...}      with file descriptors: the worker's end of its channel,
                                                           and as many more as "num_files" says
    <- {"op": "started", "worker": k, "pid": p}            or {"op": "not_started", ...}
    -> {"op": "signal", "worker": k, "signal": 15}         to the worker's whole process group ("alone": to it alone)
    <- {"op": "exited", "worker": k, "exit_code": 0, "signal": null, "peak_memory_bytes": n}
    -> {"op": "orphans", "grace_s": 30}                    should the supervisor be lost, workers have so long to save
    -> {"op": "end"}                                       it is not lost: it has done with all

A fork is only safe without threads and without accelerator state, so nothing here starts or touches any. Only this
process reaps the workers, so only it knows for sure that a number still names a worker: all signals go through it.

Nothing outlives it. It adopts every orphan below it, so that also what a worker started in a session of its own, and
left behind, comes to it. When the supervisor's end of the socket closes, or the supervisor dies, it ends what is
left, and then itself: at once, or, where the supervisor was lost while the workers were at work on steps, after the
time that they have to save and leave. When it is killed, the kernel kills the workers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.comm.messages.json_channel import LineBuffer, encode
from paceline.launch.fork import process_lifetime
from paceline.launch.fork.forked_worker import run_forked_worker

__all__ = ["main"]

# Not SIGTERM: the kernel sends it also when only the thread has ended that started this process.
PARENT_DIED = signal.SIGUSR1
HEARD = (signal.SIGCHLD, PARENT_DIED)
IGNORED = (signal.SIGINT, signal.SIGTERM)  # the supervisor decides who ends, also when all processes get the signal
TERMINATE_S, LAST_S = 1.0, 2.0  # at the end: from SIGTERM to SIGKILL for orphans; until they are given up
MAX_FDS = 16


def main(start: Mapping[str, Any]) -> None:
    """Import `start["modules"]`, then serve the socket `start["fd"]` until `start["supervisor"]` (a pid) ends."""
    supervisor: int = start["supervisor"]
    signal.signal(PARENT_DIED, lambda *_: None if os.getppid() == supervisor else os._exit(1))
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    process_lifetime.set_parent_death_signal(PARENT_DIED)
    process_lifetime.become_subreaper()
    process_lifetime.set_process_name("paceline-warm")
    if os.getppid() != supervisor:
        os._exit(1)
    sock = socket.socket(fileno=start["fd"])
    sock.set_inheritable(False)
    began = time.monotonic()
    try:
        _preload(start["modules"])
        message: dict[str, Any] = {"op": "ready", "threads": _other_threads(), "devices_touched": _devices_touched()}
    except (Exception, SystemExit) as error:  # whatever somebody else's module does while it is imported
        message = {
            "op": "failed",
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    sys.stdout.flush()
    sys.stderr.flush()
    server = _ForkServer(sock, supervisor)
    server.tell(message | {"seconds": round(time.monotonic() - began, 3)})
    if message["op"] == "ready":
        try:
            server.serve()
            server.wait_for_orphans()
        finally:
            server.end_all()
    os._exit(0)  # the interpreter's own end takes long once torch is loaded, and has nothing to do


def _preload(modules: Sequence[str]) -> None:
    """Import what every worker needs; the memory stays shared with them."""
    gc.disable()  # an import makes much that lives and little that dies
    for name in modules:
        importlib.import_module(name)
    if "torch" in modules:
        # The first optimizer that is made imports nearly as much again as torch itself did.
        torch = sys.modules["torch"]
        torch.optim.AdamW([torch.zeros(0, requires_grad=True)])
    gc.enable()
    gc.freeze()  # a collection in a worker does not write to, and so copy, what was there before


def _other_threads() -> list[str]:
    """Names of the threads of this process but its first one; a fork would leave whatever they hold locked for ever."""
    found = _thread_names()
    if found:
        # numpy's OpenBLAS starts threads when it is loaded, and ends them before a fork; the first one may as well be
        # this.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        found = _thread_names()
    return found


def _thread_names() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(task.name) != os.getpid():
                names.append((task / "comm").read_text().strip())
    return names


def _devices_touched() -> bool:
    """Whether torch has opened the accelerator, which cannot be used after a fork."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


class _ForkServer:
    """Serves the supervisor's requests, one at a time."""

    def __init__(self, sock: socket.socket, supervisor: int) -> None:
        self._sock, self._supervisor = sock, supervisor
        self._workers: dict[int, int] = {}  # by process number, until reaped
        self._lines, self._fds = LineBuffer(), deque[int]()
        self._orphans_grace_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)

    def tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor has gone: reading finds it, and ends
            self._sock.sendall(encode(message))

    def serve(self) -> None:
        """Return when the supervisor has gone."""
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for signum in HEARD:
            signal.signal(signum, lambda *_: None)  # the number is read from the wakeup socket
        self._selector.register(self._sock, selectors.EVENT_READ, self._read_requests)
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        going_on = os.getppid() == self._supervisor
        while going_on:
            for key, _ in self._selector.select():
                going_on = key.data() and going_on

    def wait_for_orphans(self) -> None:
        """Return when all workers have ended, or their time is over, where the supervisor was lost."""
        self._selector.unregister(self._sock)
        deadline = time.monotonic() + self._orphans_grace_s
        while self._workers and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data()

    def end_all(self) -> None:
        """Kill the workers with everything in their groups, then end what they left in other sessions."""
        for pid in self._workers:
            _kill_group(pid, signal.SIGKILL)
        began = time.monotonic()
        signalled: set[tuple[int, int]] = set()
        while (passed := time.monotonic() - began) < LAST_S:
            signum = signal.SIGTERM if passed < TERMINATE_S else signal.SIGKILL
            for pid in process_lifetime.child_pids():
                if pid not in self._workers and (pid, signum) not in signalled:
                    signalled.add((pid, signum))
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signum)
            if not self._reap():
                return
            time.sleep(0.005)  # a child of a child that ends becomes one's own without a signal

    def _read_requests(self) -> bool:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, 1 << 16, MAX_FDS)
        except ConnectionError:
            return False
        self._fds += fds
        if not data:
            return False
        if flags & socket.MSG_CTRUNC:
            raise OSError("a file of a worker's was lost on the way: this process may open no more files (ulimit -n)")
        for request in self._lines.feed(data):
            if request["op"] == "fork":
                self._fork(request, [self._fds.popleft() for _ in range(1 + request.get("num_files", 0))])
            elif request["op"] == "signal":
                self._signal(request["worker"], request["signal"], alone=request.get("alone", False))
            elif request["op"] == "orphans":
                self._orphans_grace_s = float(request["grace_s"])
            elif request["op"] == "end":
                self._orphans_grace_s = 0.0
                return False
            else:
                raise ValueError(f"unknown request {request['op']!r}")
        return True

    def _read_signals(self) -> bool:
        if signal.SIGCHLD in self._signals.recv(4096):
            self._reap()
        return os.getppid() == self._supervisor

    def _fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        worker: int = request["worker"]
        # A signal that comes before the child has its own dispositions waits for them, also one that is ignored here.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*HEARD, *IGNORED))
        warm_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.tell({"op": "not_started", "worker": worker, "reason": error.strerror})
            pid = -1
        if pid == 0:
            self._forget_all()
            run_forked_worker(request, channel_fd=fds[0], vault_fds=fds[1:], warm_pid=warm_pid, mask=mask)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._workers[pid] = worker
            self.tell({"op": "started", "worker": worker, "pid": pid})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _forget_all(self) -> None:
        """Close, in a worker, what belongs to the warm parent and to other workers."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for sock in (self._sock, self._signals, self._wakeup):
            sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _signal(self, worker: int, signum: int, *, alone: bool) -> None:
        for pid, number in self._workers.items():
            if number == worker and alone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            elif number == worker:
                _kill_group(pid, signum)

    def _reap(self) -> bool:
        """Report every worker that has ended, and take every other child's status; False when no child is left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid: int = ended.si_pid
                if pid in self._workers:
                    _kill_group(pid, signal.SIGKILL)  # what it has left; until it is reaped the group is surely its own
                _, status, usage = os.wait4(pid, 0)
                if pid in self._workers:
                    self._report(self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss)
            return True
        return False

    def _report(self, worker: int, pid: int, code: int, max_rss: int) -> None:
        self.tell(
            {
                "op": "exited",
                "worker": worker,
                "pid": pid,
                "exit_code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "peak_memory_bytes": max_rss * (1024 if sys.platform == "linux" else 1),
            }
        )


def _kill_group(pid: int, signum: int) -> None:
    """Signal the worker `pid` and all of its group; a worker that has not made its group yet gets the signal alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            os.kill(pid, signum)
