"""The warm parent: a fork server that imports torch once, then forks this host's workers (compare multiprocessing's).

The supervisor starts it as a fresh interpreter (`paceline.launch.fork.warm_parent_client` holds the other end). It only
does what the supervisor requests over one inherited socket:

    <- {"op": "ready", "threads": [], ...}                 or {"op": "failed", ...}: an import failed
    -> {"op": "fork", "worker": k, "assignment": ...}      with file descriptors: the worker's end of its channel,
                                                           and as many more as "num_files" says
    <- {"op": "started", "worker": k, "pid": p}            or {"op": "not_started", ...}
    -> {"op": "signal", "worker": k, "signal": 15}         to the worker's process group ("alone": only to the worker)
    <- {"op": "exited", "worker": k, "exit_code": 0, "signal": null, "peak_memory_bytes": n, "is_early": false}
                                                           ("is_early": it has not said that its function returned)
    -> {"op": "ping"}                                      <- {"op": "pong"}: this process is at work
    -> {"op": "orphans", "grace_s": 30}                    if the supervisor is lost, workers have this long to save
    -> {"op": "end"}                                       the supervisor is done: end all workers at once

A fork is only safe without threads and without accelerator state, so this process starts no thread and opens no device.
Only this process reaps the workers, so only it knows that a pid still names a worker: all signals go through it.

No process outlives it. It adopts every orphaned descendant, including processes that a worker started in a session of
their own. When the supervisor ends or closes the socket, this process ends what is left, then itself. If the supervisor
was lost while the workers were taking steps, they first get the time to save and leave. If this process is killed, the
kernel kills the workers.
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

from paceline import environment
from paceline.comm.messages.json_channel import LineBuffer, encode
from paceline.comm.messages.socket_directory import remove_socket_directories
from paceline.end_mark import EndMark
from paceline.launch.fork import process_lifetime
from paceline.launch.fork.forked_worker import run_forked_worker

__all__ = ["main"]

# Not SIGTERM: the kernel also sends this signal when only the thread ends that started this process.
PARENT_ENDED = signal.SIGUSR1
HANDLED_SIGNALS = (signal.SIGCHLD, PARENT_ENDED)
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # the supervisor decides which processes end
TERMINATE_S, GIVE_UP_S = 1.0, 2.0  # when ending orphans: SIGTERM until the first time, SIGKILL until the second
MAX_FDS = 16


def main(start: Mapping[str, Any]) -> None:
    """Import `start["modules"]`, then serve the socket `start["fd"]` until `start["supervisor"]` (a pid) ends."""
    supervisor: int = start["supervisor"]
    signal.signal(PARENT_ENDED, lambda *_: None if os.getppid() == supervisor else os._exit(1))
    for signum in IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    process_lifetime.set_parent_death_signal(PARENT_ENDED)
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
    except (Exception, SystemExit) as error:  # an imported module may raise anything
        message = {
            "op": "failed",
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
        }
    environment.end_preloading()
    sys.stdout.flush()
    sys.stderr.flush()
    server = _ForkServer(sock, supervisor)
    server.send(message | {"seconds": round(time.monotonic() - began, 3)})
    if message["op"] == "ready":
        try:
            server.serve()
            server.wait_for_orphans()
        finally:
            server.end_all()
            remove_socket_directories(environment.family() or "")  # the supervisor may be lost
    os._exit(0)  # the interpreter's own shutdown is slow once torch is loaded, and not needed


def _preload(modules: Sequence[str]) -> None:
    """Import what every worker needs; workers share this memory."""
    environment.look_for_devices_without_opening_them()  # a module may look while it is imported
    gc.disable()  # imports create long-lived objects, so collections during them are wasted
    for name in modules:
        importlib.import_module(name)
    if "torch" in modules:
        # The first optimizer imports nearly as many modules as torch itself.
        torch = sys.modules["torch"]
        torch.optim.AdamW([torch.zeros(0, requires_grad=True)])
    gc.enable()
    gc.freeze()  # a collection in a worker does not touch these objects, so their pages stay shared


def _other_threads() -> list[str]:
    """Return the names of all threads but the main one; locks that they hold would stay locked in a forked child."""
    found = _thread_names()
    if found:
        # numpy's OpenBLAS starts threads when it is loaded, and ends them at the first fork: fork once here.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        found = _thread_names()
    return found


def _thread_names() -> list[str]:
    names = []
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the thread has just ended
            if int(task.name) != os.getpid():
                names.append((task / "comm").read_text().strip())
    return names


def _devices_touched() -> bool:
    """Return whether torch has opened the accelerator, which cannot be used after a fork."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


class _ForkServer:
    """Serves the supervisor's requests, one at a time."""

    def __init__(self, sock: socket.socket, supervisor: int) -> None:
        self._sock, self._supervisor = sock, supervisor
        self._workers: dict[int, int] = {}  # rank by pid, until reaped
        self._marks: dict[int, EndMark] = {}  # by pid
        self._lines, self._fds = LineBuffer(), deque[int]()
        self._orphans_grace_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended: the next read notices it and ends
            self._sock.sendall(encode(message))

    def serve(self) -> None:
        """Serve requests until the supervisor has ended."""
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for signum in HANDLED_SIGNALS:
            signal.signal(signum, lambda *_: None)  # the signal number is read from the wakeup socket
        self._selector.register(self._sock, selectors.EVENT_READ, self._read_requests)
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        is_serving = os.getppid() == self._supervisor
        while is_serving:
            for key, _ in self._selector.select():
                is_serving = key.data() and is_serving

    def wait_for_orphans(self) -> None:
        """Wait until all workers have ended; if the supervisor was lost, at most for the time they have to save."""
        self._selector.unregister(self._sock)
        deadline = time.monotonic() + self._orphans_grace_s
        while self._workers and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data()

    def end_all(self) -> None:
        """Kill the workers' process groups, then end what the workers started in other sessions."""
        for pid in self._workers:
            _kill_group(pid, signal.SIGKILL)
        began = time.monotonic()
        signalled: set[tuple[int, int]] = set()
        while (passed := time.monotonic() - began) < GIVE_UP_S:
            signum = signal.SIGTERM if passed < TERMINATE_S else signal.SIGKILL
            for pid in process_lifetime.child_pids():
                if pid not in self._workers and (pid, signum) not in signalled:
                    signalled.add((pid, signum))
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signum)
            if not self._reap():
                return
            time.sleep(0.005)  # orphans are adopted without a signal, so poll

    def _read_requests(self) -> bool:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, 1 << 16, MAX_FDS)
        except ConnectionError:
            return False
        self._fds += fds
        if not data:
            return False
        if flags & socket.MSG_CTRUNC:
            raise OSError("a worker's file descriptor was lost: this process may open no more files (raise ulimit -n)")
        for request in self._lines.feed(data):
            if request["op"] == "fork":
                self._fork(request, [self._fds.popleft() for _ in range(1 + request.get("num_files", 0))])
            elif request["op"] == "signal":
                self._signal(request["worker"], request["signal"], alone=request.get("alone", False))
            elif request["op"] == "ping":
                self.send({"op": "pong"})
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
        # A signal that arrives before the child has set its own handlers must wait, even one that is ignored here.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*HANDLED_SIGNALS, *IGNORED_SIGNALS))
        warm_pid, pid, mark = os.getpid(), -1, None
        try:
            mark = EndMark()
            pid = os.fork()
        except OSError as error:
            self.send({"op": "not_started", "worker": worker, "reason": error.strerror})
        if pid == 0 and mark is not None:
            mark.hold()
            self._close_parent_fds()
            run_forked_worker(request, channel_fd=fds[0], snapshot_fds=fds[1:], warm_pid=warm_pid, mask=mask)
        for fd in fds:
            os.close(fd)
        if pid > 0 and mark is not None:
            self._workers[pid], self._marks[pid] = worker, mark
            self.send({"op": "started", "worker": worker, "pid": pid})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _close_parent_fds(self) -> None:
        """Close, in a worker, the descriptors of the warm parent and of other workers."""
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
        """Report every worker that has ended, and reap all other children; return False if no child is left."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                pid: int = ended.si_pid
                if pid in self._workers:
                    _kill_group(pid, signal.SIGKILL)  # its children; until it is reaped, the group id cannot be reused
                _, status, usage = os.wait4(pid, 0)
                if pid in self._workers:
                    self._report(self._workers.pop(pid), pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss)
            return True
        return False

    def _report(self, worker: int, pid: int, code: int, max_rss: int) -> None:
        mark = self._marks.pop(pid)
        self.send(
            {
                "op": "exited",
                "worker": worker,
                "pid": pid,
                "exit_code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "peak_memory_bytes": max_rss * (1024 if sys.platform == "linux" else 1),
                "is_early": code >= 0 and not mark.is_set,
            }
        )
        mark.close()


def _kill_group(pid: int, signum: int) -> None:
    """Signal the process group of the worker `pid`, or only the worker if it has not created its group yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, signum)
        except ProcessLookupError:
            os.kill(pid, signum)
