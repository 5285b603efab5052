"""The process that programs of tests are forked from, as a program: `python warm_source.py FD LISTENER_FD`.

    a test --request, files--> this --fork--> the program --fork, while it is clean--> its warm parent

A command that is started in a shell asks as a test does, through the listener (see `warm_client`).

It has imported what programs need and has done nothing else: no threads, no random numbers, no run. See `warm.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imported
import leaks

__all__ = ["MARKS", "SEARCHED", "STATUS", "TORCHRUN"]

# Marks by which processes are found in /proc: text of the same length is put in their place, which only then is seen.
MARKS = {leaks.PROGRAM_MARK: 32, "PACELINE_FAMILY": 16}
TORCHRUN = "torch.distributed.run"  # starts interpreters, and is none of Paceline's
SEARCHED = "PYTHONPATH"  # the one variable read early that may differ: it is known what Python does with it
STATUS = struct.Struct("i")  # of what is told of a program: its number, and later its end
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000  # linux/sched.h
F_SETSIG = 10  # linux/fcntl.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h

_places: dict[str, int] = {}  # addresses of MARKS in this process, and in all that are forked from it


def serve(sock: socket.socket, listener: socket.socket | None = None) -> dict[str, Any] | None:
    """Fork for each request that comes, from the test or through the listener; returns it in the child, and None here
    when the test cannot ask any more.
    """
    selector = selectors.DefaultSelector()
    heard, wakeup = socket.socketpair()
    for end in (heard, wakeup):
        end.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the process that asked decides
    ends = [end for end in (sock, listener, heard, wakeup) if end is not None]
    for end in ends[:-1]:
        selector.register(end, selectors.EVENT_READ)
    told: dict[int, int] = {}  # where each child's end is told, by process number
    while True:
        for key, _ in selector.select():
            if key.fileobj is heard:
                heard.recv(4096)
                _reap(told)
                continue
            if listener is not None and key.fileobj is listener:
                with listener.accept()[0] as caller:
                    request, files = _received(caller)
                if request is None:
                    continue
            else:
                request, files = _received(sock)
                if request is None:
                    return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for end in (selector, *ends):
                    end.close()
                for fd in (*told.values(), files[3]):
                    os.close(fd)
                _take_streams(files[:3])
                for life in files[4:]:
                    _end_with(life)
                return request
            for fd in (*files[:3], *files[4:]):
                os.close(fd)
            told[pid] = files[3]
            _tell(files[3], pid)


def _reap(told: dict[int, int]) -> None:
    while told:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if (fd := told.pop(pid, None)) is not None:
            _tell(fd, status)
            os.close(fd)


def _tell(fd: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(fd, STATUS.pack(number))


def _end_with(life: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed, as it is by the death of its holder."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if os.read(life, 1) == b"":
            os.kill(os.getpid(), signal.SIGKILL)  # closed before it was looked at


def _received(sock: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, files, _, _ = socket.recv_fds(sock, 4, 5)
    if not head:
        return None, []
    (length,) = struct.unpack("I", head)
    data = bytearray()
    while len(data) < length:
        data += sock.recv(length - len(data))
    return json.loads(data), files


def _take_streams(files: Sequence[int]) -> None:
    for stream, fd in enumerate(files):
        os.dup2(fd, stream)
    for fd in set(files):
        os.close(fd)


def become(request: Mapping[str, Any]) -> None:
    """Be the program of a request, to its end."""
    if request["own_session"]:
        os.setsid()
    if request["host"]:
        _enter(*request["host"])
    if request.get("spaces_of"):
        _enter_spaces_of(request["spaces_of"])
    _take_environment(request["environment"])
    os.chdir(request["folder"])
    words: list[str] = request["words"]
    if words[:3] == ["-m", "paceline", "drill"] or "paceline.testing" in _text_of(words[0]):
        _fork_runs()
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    for path in reversed(os.environ.get(SEARCHED, "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    if TORCHRUN not in words:
        _prepare_warm_parents(6 if "parity" in words else 1)  # that command has one for each of its runs
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        _leave(_exit_status(stop))
    except BaseException as error:  # shown as the interpreter does, without what is above the program here
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        _leave(1)
    _leave(0)


def _text_of(name: str) -> str:
    path = Path(name)
    return path.read_text() if path.suffix == ".py" and path.exists() else ""


def _fork_runs() -> None:
    """Have the runs that this program will start forked too, from a process that is as this one is now."""
    import warm
    from paceline.testing import runs

    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        request = serve(theirs)
        if request is not None:
            become(request)
        os._exit(0)
    theirs.close()
    warm.ask(ours)
    runs.subprocess = warm.Subprocess  # type: ignore[assignment]


def _exit_status(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _leave(status: int) -> None:
    """End as the interpreter does, but for taking all modules to pieces: that is as much work as some programs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _enter(namespace: str, name: str, hosts_file: str) -> None:
    """Be on a host, as its `prefix` has a command be."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: Any) -> None:
        if getattr(libc, function)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{function}{arguments}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{namespace}") as network:
        call("setns", network.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS | CLONE_NEWUTS)
    call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    call("mount", hosts_file.encode(), b"/etc/hosts", None, ctypes.c_ulong(MS_BIND), None)
    socket.sethostname(name)


def _enter_spaces_of(pid: int) -> None:
    """Be on the host of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("net", "uts", "mnt"):
        theirs, ours = f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}"
        if os.readlink(theirs) != os.readlink(ours):
            with open(theirs) as space:
                if libc.setns(space.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"setns to {theirs}")


def _take_environment(variables: Mapping[str, str]) -> None:
    for name, length in MARKS.items():
        value = variables.get(name, "")
        if len(value) == length:
            _seen_from_outside(name, value)
    os.environ.clear()
    os.environ.update(variables)


def _find_marks() -> None:
    """Note where this process, and each that is forked from it, has its marks for /proc to show."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    _places.update({name: libc.getenv(name.encode()) for name in MARKS})


def _seen_from_outside(name: str, value: str) -> None:
    """Write over a variable in the memory in which this process has got it."""
    if (place := _places.get(name)) is not None:
        ctypes.memmove(place, value.encode(), len(value))


def _prepare_warm_parents(count: int) -> None:
    """Fork the processes that become the program's warm parents while there is nothing of the program in them yet.
    Should it want more of them, it starts those as it always does."""
    from paceline.launch.fork import warm_parent_client

    waiting: list[tuple[_Child, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for sock in (ours, *(sock for _, sock in waiting)):
                sock.close()
            _be_warm_parent(theirs)
        theirs.close()
        waiting.append((_Child(pid), ours))
    start_anew = warm_parent_client.WarmParent.start.__func__  # type: ignore[attr-defined]

    def start(
        cls: type[warm_parent_client.WarmParent],
        *,
        modules: Sequence[str] = warm_parent_client.MODULES,
        entry: str = warm_parent_client.ENTRY,
    ) -> warm_parent_client.WarmParent:
        if not waiting:
            return start_anew(cls, modules=modules, entry=entry)
        process, ours = waiting.pop(0)
        link, link_theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        family = secrets.token_hex(8)
        request = {
            "supervisor": os.getpid(),
            "modules": list(modules),
            "paths": [path for path in sys.path if isinstance(path, str)],
            "environment": warm_parent_client.child_environment(**{warm_parent_client.FAMILY_VARIABLE: family}),
        }
        data = json.dumps(request).encode()
        with ours, link_theirs:
            socket.send_fds(ours, [struct.pack("I", len(data))], [link_theirs.fileno(), output.fileno()])
            ours.sendall(data)
        as_popen: Any = process
        return cls(as_popen, link, output, entry=entry, family=family)

    warm_parent_client.WarmParent.start = classmethod(start)  # type: ignore[method-assign,assignment]


class _Child:
    """A process that was forked here, with what `WarmParent` asks of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if deadline is not None else 0)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("paceline-warm", timeout or 0)
            else:
                time.sleep(0.002)  # as Popen does, where nothing tells
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _be_warm_parent(sock: socket.socket) -> None:
    """Wait until the program wants it, and be it; end where the program ends without."""
    try:
        request, files = _received(sock)
        sock.close()
        if request is None:
            os._exit(0)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        link = os.dup(files[0])
        _take_streams([null, files[1], files[1]])
        os.close(files[0])
        _take_environment(request.pop("environment"))
        sys.path[:] = request["paths"]
        from paceline.launch.fork.warm_parent import main

        main({**request, "fd": link})
    except BaseException:  # the process boundary: nothing may go on into the program's code
        traceback.print_exc()
    finally:
        os._exit(1)


def preload() -> None:
    """Import what programs and their workers need, as a warm parent does, and what their supervisors need."""
    import gc
    import importlib

    from paceline.launch.fork.warm_parent_client import MODULES

    for name in (
        *MODULES,
        "torch.utils.data",
        "paceline.runs.restart_loop",
        "paceline.runs.attempt",
        "paceline.runs.run",
        "paceline.runs.join_world",
        "paceline.cli.main",
        "paceline.cli.parity.run",
        "paceline.cli.plan_costs.question",
        "paceline.monitor.audit.audit",
        "paceline.monitor.status.status",
        "tensorboard.compat.proto.event_pb2",  # by a run that writes for TensorBoard: more than all its other imports
        "tensorboard.summary.writer.record_writer",
    ):
        importlib.import_module(name)
    imported.import_all()
    gc.collect()
    gc.freeze()
    imported.collect_seldom()
    pid = os.fork()  # numpy's OpenBLAS ends its threads before a fork
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main(*fds: int) -> None:
    sock, listener = (socket.socket(fileno=fd) for fd in fds)
    for end in (sock, listener):
        end.set_inheritable(False)
    _find_marks()
    preload()
    request = serve(sock, listener)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
