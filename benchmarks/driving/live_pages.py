"""A run, the server of its live page, and pages that listen to it as a browser does: for measurements of these."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline import clock

__all__ = ["Listener", "cpu_s_of", "metrics_rows", "served", "training", "waited_s_of"]

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "shown_on_page.py"
START_S = 120.0
END_S = 60.0
SILENCE_S = 30.0  # without a byte from the server
RECEIVED = 1 << 16  # bytes at once


@contextlib.contextmanager
def training(run_dir: Path, *, workers: int, pause_s: float) -> Iterator[None]:
    """A run that goes on until the end of the block; begins when it has taken its first steps."""
    command = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", str(workers), "--threads", "1"]
    command += ["--run-dir", str(run_dir), "--no-save-at-end", "--no-tensorboard", "--", "--pause-s", str(pause_s)]
    log = run_dir.parent / f"{run_dir.name}.out"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + START_S
            while len(metrics_rows(run_dir)) < 3:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the run has not begun:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield
        finally:
            _end(process, signal.SIGTERM)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """The page's server over a folder of runs: its address and process number."""
    command = [sys.executable, "-m", "paceline", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if "http://" not in line:
                raise SystemExit(f"paceline ui has not started: {line!r}")
            yield line.split()[-1], process.pid
        finally:
            _end(process, signal.SIGINT)


def _end(process: subprocess.Popen[Any], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(END_S)
    finally:
        process.kill()


def metrics_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's metrics so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Listener(threading.Thread):
    """A page of a run, from `with` to its end. `arrived`: when each step came, by the clock of commits; steps of the
    first message, which were there before, are left out."""

    def __init__(self, address: str, run: str, *, reads: bool = True) -> None:
        """`reads`: look into the messages; without it their bytes are received and dropped, which takes as little of
        the cores as can be."""
        super().__init__(daemon=True)
        place = urlsplit(address)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=SILENCE_S)
        self._path, self._reads = f"/api/run/stream?run={run}", reads
        self.arrived: dict[int, float] = {}
        self.error: Exception | None = None
        self._is_ending = False
        self.has_begun = threading.Event()

    def __enter__(self) -> Listener:
        self.start()
        if not self.has_begun.wait(SILENCE_S):
            raise SystemExit(f"the page has shown nothing for {SILENCE_S:.0f} s: {self.error}")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self.join(SILENCE_S)

    def run(self) -> None:
        try:
            self._connection.request("GET", self._path)
            if self._reads:
                answer = self._connection.getresponse()
                while line := answer.readline():
                    if line.startswith(b"data: "):
                        self._take(line[6:])
            else:
                while self._connection.sock.recv(RECEIVED):
                    self.has_begun.set()
        except (OSError, http.client.HTTPException, AttributeError) as error:  # its own end closes what it reads from
            self.error = None if self._is_ending else error
        finally:
            self._connection.close()

    def _take(self, text: bytes) -> None:
        now = clock.now()
        is_first = not self.has_begun.is_set()
        points: Sequence[Sequence[float]] = (
            json.loads(text).get("curves", {}).get("series", {}).get("time", {}).get("points", ())
        )
        for _, step, *_ in points:
            self.arrived.setdefault(int(step), -1.0 if is_first else now)
        self.has_begun.set()


def cpu_s_of(pid: int) -> float:
    """Seconds of a core that a process has used, and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def waited_s_of(pid: int) -> float:
    """Seconds for which the threads of a process were ready to run and waited for a core (proc(5), `schedstat`)."""
    waited_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9
