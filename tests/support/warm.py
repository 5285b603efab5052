"""Programs of tests started as forks of one process that has paid for `import torch`, and not each with two imports.

A user's `python program.py` imports torch, and so does the warm parent that it starts: seconds of work before the first
step, in each of hundreds of tests whose claim is about what comes later. Here both are forks of a process that has
imported what they need and has done nothing else: no threads, no random numbers, no run. The program runs under its own
name, in a folder, an environment and streams of its own, and everything after the imports is what users run. Claims on
how programs start have them started as users do (`subprocess`, or `programs.command(..., cold=True)`).

This is the tests' side; the process that is forked is `warm_source.py`.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import lasting
import leaks
import warm_source
from warm_source import MARKS, SEARCHED, STATUS

if TYPE_CHECKING:
    from paceline.testing.network_namespaces import NamespaceHost

__all__ = ["Process", "Running", "Subprocess", "ask", "can_start", "close", "interpreter", "run", "shell_path", "start"]

MODULES = ("paceline", warm_source.TORCHRUN)
# Looked at when Python or torch is loaded: with another value of these a program has to be loaded anew.
READ_EARLY = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH", "PYTHON", "LD_", "GLIBC_", "MALLOC_")


class Process:
    """A program that was started here; what `subprocess.Popen` has of the same names does the same."""

    def __init__(self, told_fd: int, stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self._told = os.fdopen(told_fd, "rb", buffering=0)
        self.stdin, self.stdout, self.stderr = None, stdout, stderr
        self.returncode: int | Any = None  # as Popen has it
        self.pid = self._next()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._next())
            self._told.close()
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[str, str]:
        """What it and all that inherited its output have written until the last of them has ended or closed it."""
        deadline = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        written = {stream: bytearray() for stream in streams}
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(stream)
            while streams:
                readable: list[IO[str]] = select.select(streams, [], [], max(0.0, deadline - time.monotonic()))[0]
                if not readable:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
                for stream in readable:
                    chunk = os.read(stream.fileno(), 1 << 16)
                    written[stream] += chunk
                    if not chunk:
                        streams.remove(stream)
        self.wait(max(0.0, deadline - time.monotonic()))
        out, err = (
            written[stream].decode(errors="backslashreplace") if stream is not None else ""
            for stream in (self.stdout, self.stderr)
        )
        return out, err

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _next(self) -> int:
        told = self._told.read(STATUS.size)
        if len(told or b"") < STATUS.size:
            raise RuntimeError("the process that programs are forked from has ended")
        (number,) = STATUS.unpack(told)
        return number


Running: TypeAlias = "subprocess.Popen[str] | Process"


class _Source:
    """A process that programs are forked from, seen from who asks it to. `address`: where shells ask it."""

    def __init__(
        self, sock: socket.socket, *, address: str = "", process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._sock, self.address, self._process = sock, address, process
        self.environment = dict(os.environ)

    @classmethod
    def begin(cls) -> _Source:
        ours, theirs = socket.socketpair()
        listener, address = socket.socket(socket.AF_UNIX), str(lasting.folder("warm") / "listener")  # for all networks
        listener.bind(address)
        listener.listen()
        fds = [theirs.fileno(), listener.fileno()]
        marked = {name: "-" * length for name, length in MARKS.items()}
        paths = [str(Path(__file__).resolve().parents[2] / "src"), *filter(None, [os.environ.get(SEARCHED)])]
        with theirs, listener:
            process = subprocess.Popen(
                [sys.executable, warm_source.__file__, *map(str, fds)],
                env=os.environ | marked | {SEARCHED: os.pathsep.join(paths)},
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
            )
        leaks.LASTING_PIDS.add(process.pid)
        return cls(ours, address=address, process=process)

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> None:
        data = json.dumps(request).encode()
        self._sock.sendmsg(
            [struct.pack("I", len(data))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
        self._sock.sendall(data)

    def close(self) -> None:
        self._sock.close()
        if self._process is not None:
            self._process.wait(60)
            leaks.LASTING_PIDS.discard(self._process.pid)


_sources: list[_Source] = []  # at most one, of this test process


def can_start(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a command may be started by `start`: a script or one of MODULES, and no variable that is read early."""
    is_module = len(words) > 2 and words[1] == "-m" and words[2] in MODULES
    if words[0] != sys.executable or not (is_module or (len(words) > 1 and words[1].endswith(".py"))):
        return False
    loaded = _sources[0].environment if _sources else os.environ
    return all(environment.get(name) == loaded.get(name) for name in _read_early(environment.keys() | loaded.keys()))


def _read_early(names: Iterable[str]) -> list[str]:
    early = [name for name in names if name.startswith(READ_EARLY) and name != SEARCHED]
    return [name for name in early if not name.startswith("TORCHELASTIC_")]  # read when a worker meets the others


def start(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.STDOUT,
    start_new_session: bool = False,
    host: NamespaceHost | None = None,
) -> Process:
    """Start a command for which `can_start` holds, on a host of `network.two_hosts` where one is given. The streams are
    as with Popen; nothing comes on standard input."""
    source = _source()
    with contextlib.ExitStack() as stack:
        null = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, null)
        out, ours = _given(stdout, null, stack)
        err, ours_too = (out, None) if stderr == subprocess.STDOUT else _given(stderr, null, stack)
        told, tells = os.pipe()
        stack.callback(os.close, tells)
        request = {
            "words": list(words[1:]),
            "folder": str(Path(cwd or Path.cwd()).absolute()),
            "environment": dict(env),
            "own_session": start_new_session,
            "host": host and [host.namespace, host.name, str(host.hosts_file)],
        }
        source.ask(request, [null, out, err, tells])
    return Process(told, ours, ours_too)


def run(words: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Start a command and return when it has ended; it and its output are as with `subprocess.run`."""
    process = start(words, **options)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(list(words), process.wait(), out, err)


def shell_path(folder: Path) -> str:
    """Write programs `python` and `paceline` that start commands as `start` does, and return a PATH that begins with
    them: for the lines of a shell."""
    folder.mkdir()
    interpreter(folder)
    return os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])


def interpreter(folder: Path) -> Path:
    """Write these programs, and return the path of `python`: for launchers that start workers by it.

    What is started is a fork that receives the signals of the process that a launcher knows, and ends with it.
    """
    source = _source()
    loaded = {name: source.environment.get(name) for name in _read_early(source.environment)}
    given = f"address={source.address!r}, python={sys.executable!r}, early={loaded!r}"
    for name, words in (("python", []), ("paceline", ["-m", "paceline"])):
        program = folder / name
        program.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import warm_client\nwarm_client.main([*{words!r}, *sys.argv[1:]], {given})\n"
        )
        program.chmod(0o755)
    return folder / "python"


def _source() -> _Source:
    if not _sources:
        _sources.append(_Source.begin())
    return _sources[0]


class Subprocess:
    """Stands for the module of this name where commands are started that may as well be forks."""

    DEVNULL, STDOUT, TimeoutExpired = subprocess.DEVNULL, subprocess.STDOUT, subprocess.TimeoutExpired

    @staticmethod
    def Popen(words: Sequence[str], *, env: Mapping[str, str], stdin: int, **options: Any) -> Running:
        if can_start(words, env):
            return start(words, env=env, **options)
        return subprocess.Popen(words, env=env, stdin=stdin, **options)


def ask(sock: socket.socket) -> None:
    """Have what is started in this process forked from the one at the other end."""
    _sources.append(_Source(sock))


def close() -> None:
    """End the process that programs are forked from, where there is one."""
    while _sources:
        _sources.pop().close()


def _given(stream: int | IO[Any], null: int, stack: contextlib.ExitStack) -> tuple[int, IO[str] | None]:
    """The program's end of a stream, and ours where it is a pipe."""
    if stream == subprocess.PIPE:
        read_fd, write_fd = os.pipe()
        stack.callback(os.close, write_fd)
        return write_fd, os.fdopen(read_fd, encoding="utf-8", errors="backslashreplace")
    if stream == subprocess.DEVNULL:
        return null, None
    return stream if isinstance(stream, int) else stream.fileno(), None
