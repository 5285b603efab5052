"""What tests of strangers share: another user of this host who tries everything, a flood, and what a run opens.

`AnotherUser` is a process with another user id. It is told where a run's sockets and files are, as root sees them, and
says what it could do with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.io.event_loop import EventLoop
from supervised_launch import marked

__all__ = ["TOKEN", "AnotherUser", "Opened", "another_user", "needs_root", "opened_by", "turn_until"]

TOKEN = b"a token of sufficient length"
NOBODY = 65534
CHECKOUT = str(Path(__file__).parents[2])
LISTENS = "0A"  # in /proc/net/tcp
ACCEPTS = 1 << 16  # in /proc/net/unix: it is a listening socket

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process takes another user's id")

SOURCE = """
import json, os, socket, sys
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)  # only now: Python itself may lie where that user cannot read
junk = [b"", b"\\n", b"{}\\n" * 50, b'{"op": "set", "key": "a", "value": "YQ=="}\\n', b'{"op": "stop"}\\n',
        b"PACELIN2" + bytes(64), b"\\0" * 4096, b"\\xff" * 4096, b"[" * 9000, bytes.fromhex(sys.argv[1]) * 3,
        b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\xff" + b"\\0" * 8 + b"\\x7f", b"\\x16\\x03\\x01\\x02\\0\\x01"]

def attack(kind, place, data, waits):
    family = {"unix": socket.AF_UNIX, "tcp": socket.AF_INET, "tcp6": socket.AF_INET6}[kind]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(waits)
        try:
            sock.connect(place if kind == "unix" else tuple(place))
        except OSError as error:
            return "not connected"
        heard = b""
        try:
            sock.sendall(data)
            while len(heard) < 1000:
                more = sock.recv(1000)
                if not more:
                    break
                heard += more
        except OSError:
            pass
        return "connected" + (": " + heard.hex() if heard else "")

def hidden():  # where other users' processes listen, as every user sees it
    with open("/proc/net/unix") as file:
        rows = [row.split(maxsplit=7) for row in file]
    return {row[7].strip() for row in rows if len(row) == 8 and "/paceline-" in row[7]}

def attempt(path):
    done = []
    for name, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            done.append(name)
        except OSError:
            pass
    return done

for line in sys.stdin:
    asked = json.loads(line)
    sockets, files = {}, {}
    for kind, place in asked["sockets"]:
        found = {attack(kind, place, data, 0.05) for data in junk}
        for number in range(asked["times"]):
            found.add(attack(kind, place, b"", 0.0005))
            for path in hidden() if number % 50 == 0 else ():
                found.add(attack("unix", path, b"", 0.0005) if os.path.exists(path) else "not connected")
        sockets[json.dumps([kind, place])] = sorted(found)
    for path in asked["files"]:
        if can := attempt(path):
            files[path] = can
    print(json.dumps({"sockets": sockets, "files": files}), flush=True)
"""


class Opened:
    """What the processes of a command have open: where they listen, and their files."""

    def __init__(self) -> None:
        self.unix: set[str] = set()  # a name without a file begins with "\0"
        self.tcp: set[tuple[str, int]] = set()
        self.files: set[str] = set()

    def update(self, other: Opened) -> None:
        self.unix |= other.unix
        self.tcp |= other.tcp
        self.files |= other.files


def opened_by(mark: str) -> Opened:
    """What a command's processes have now; a shared folder that one of them lists, as /tmp, is everybody's."""
    found = Opened()
    for line in marked(mark):
        process = Path("/proc") / line.partition(":")[0]
        with contextlib.suppress(OSError):  # it ends just now
            inodes = set[str]()
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(fd)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
                    elif target.startswith(("/memfd:", "/dev/shm/", "/tmp/")) and not _is_program(target):
                        found.files |= {str(fd), target}
            found.files |= {str(process / name) for name in ("mem", "environ")}
            found.unix |= _unix(process, inodes)
            found.tcp |= _tcp(process, inodes)
    return found


def _is_program(path: str) -> bool:
    """What a process imports just now; who may read that is decided by who installed it."""
    return path.startswith((sys.prefix, sys.base_prefix, CHECKOUT)) or path.endswith((".py", ".pyc", ".so"))


def _unix(process: Path, inodes: set[str]) -> set[str]:
    rows = [line.split(maxsplit=7) for line in (process / "net/unix").read_text().splitlines()[1:]]
    listening = [row for row in rows if len(row) == 8 and row[6] in inodes and int(row[3], 16) & ACCEPTS]
    return {"\0" + row[7][1:] if row[7].startswith("@") else row[7] for row in listening}


def _tcp(process: Path, inodes: set[str]) -> set[tuple[str, int]]:
    found = set[tuple[str, int]]()
    for kind, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in map(str.split, (process / "net" / kind).read_text().splitlines()[1:]):
            if row[3] == LISTENS and row[9] in inodes:
                words, port = row[1].split(":")
                raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


class _Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


class AnotherUser:
    """Another user's process, which tries what it is told of; `could` is what it managed."""

    def __init__(self, marker: Path) -> None:
        payload = pickle.dumps(_Marker(marker)).hex()
        source = SOURCE.replace("NOBODY", str(NOBODY))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, payload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self.files: dict[str, list[str]] = {}  # that it could open
        self.answers: dict[str, set[str]] = {}  # what sockets said to it, beyond closing the connection
        self.num_connected = 0

    def attack(self, opened: Opened, *, folders: tuple[Path, ...] = (), times: int = 0) -> None:
        """Try all sockets, all files, and what is in `folders`, once, and each socket `times` times more."""
        files = {path for folder in folders for path in _paths_in(folder)} | opened.files
        files |= {name for one in opened.unix if one.startswith("/") for name in (one, str(Path(one).parent))}
        sockets = [["unix", name] for name in opened.unix]
        sockets += [["tcp6" if ":" in host else "tcp", [host, port]] for host, port in opened.tcp]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"sockets": sockets, "files": sorted(files), "times": times}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        self.files |= told["files"]
        for place, results in told["sockets"].items():
            self.num_connected += sum(result.startswith("connected") for result in results)
            said = {result for result in results if result.startswith("connected: ")}
            if said:
                self.answers.setdefault(place, set()).update(said)

    def close(self) -> None:
        self._process.communicate()


def _paths_in(folder: Path) -> Iterator[str]:
    """What is in a folder, of which the run may remove something meanwhile."""
    for place, folders, files in os.walk(folder):
        yield from (f"{place}/{name}" for name in (*folders, *files))


def turn_until(loop: EventLoop, done: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    """Let a loop turn until something has come."""
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline, "nothing more happens"
        loop.turn(0.02)


@contextlib.contextmanager
def another_user(folder: Path) -> Iterator[AnotherUser]:
    """One whose pickles would make `folder`/executed."""
    user = AnotherUser(folder / "executed")
    try:
        yield user
    finally:
        user.close()
