"""Jobs that take turns on one machine, a block of steps at a time: while one computes, the others stand still.

Whatever else the machine does meets all of them alike, which runs that follow each other do not promise: two equal ones
have been seen to differ by a third. The workers' side is in `programs/measured.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from driving.progress import doing

__all__ = ["Job", "interleaved"]

LIMIT_S = 600.0  # of a start, and of a turn
LOOK_S = 1.0  # between two looks whether a job that is waited for is still there
END_S = 20.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`command(steps, out)` starts so many workers, which take so many steps, and each leaves its times in OUT.RANK."""

    command: Callable[[int, str], Sequence[str]]
    workers: int


def interleaved(
    jobs: Sequence[Job], *, turns: int, block: int, of: Callable[[Sequence[float]], float] = statistics.median
) -> list[list[float]]:
    """Run jobs with so many turns each, A B B A ..., of `block` steps; returns, of each job, the median (or whatever
    else `of` makes of them) of the steps' milliseconds in each of its turns.

    A step ends when its last worker has taken it. A turn before all others, and the first step of each, do not count.
    Exits with what a job said where it fails.
    """
    steps = block * (turns + 1)
    with tempfile.TemporaryDirectory(prefix="paceline-interleaved-") as scratch, contextlib.ExitStack() as stack:
        doing(f"starting {len(jobs)} jobs of {steps} steps, for {turns} turns each")
        running = [
            stack.enter_context(_started(job, Path(scratch, str(number)), steps=steps, block=block))
            for number, job in enumerate(jobs)
        ]
        for job_run in running:
            job_run.await_workers()
        for number in range(turns):
            doing(f"turn {number + 1} of {turns}")
            for job_run in running if number % 2 == 0 else reversed(running):
                job_run.go()
                job_run.await_workers()
        return [job_run.end(block, of) for job_run in running]


class _RunningJob:
    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        listener: socket.socket,
        process: subprocess.Popen[str],
        *,
        workers: int,
    ) -> None:
        self._words, self._folder, self._listener, self._process = words, folder, listener, process
        self._num_workers = workers
        self._workers: list[socket.socket] = []

    def await_workers(self) -> None:
        """Return when all of them stand at the end of a turn."""
        deadline = time.monotonic() + LIMIT_S
        while len(self._workers) < self._num_workers:
            sock = self._waited(lambda: self._listener.accept()[0], deadline)
            sock.settimeout(LOOK_S)
            self._workers.append(sock)
        for sock in self._workers:
            if not self._waited(lambda sock=sock: sock.recv(1), deadline):
                self._fail("a worker left")

    def go(self) -> None:
        for sock in self._workers:
            sock.sendall(b"!")

    def end(self, block: int, of: Callable[[Sequence[float]], float]) -> list[float]:
        """Let it come to its end; returns what `of` makes of each turn."""
        self.go()
        if self._process.wait(LIMIT_S) != 0:
            self._fail("it failed")
        took = [json.loads(path.read_text())["took_ms"] for path in self._folder.glob("took.*")]
        each = [max(workers) for workers in zip(*took, strict=True)]
        return [of(each[start + 1 : start + block]) for start in range(block, len(each), block)]

    def close(self) -> None:
        for sock in [self._listener, *self._workers]:
            sock.close()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _waited(self, take: Callable[[], T], deadline: float) -> T:
        while True:
            try:
                return take()
            except TimeoutError:
                if self._process.poll() is not None:
                    self._fail("it ended")
                if time.monotonic() > deadline:
                    self._fail(f"its workers came to no end of their turn in {LIMIT_S:g} s")

    def _fail(self, why: str) -> NoReturn:
        said = (self._folder / "output").read_text()[-3000:]
        raise SystemExit(f"{' '.join(self._words)}: {why}\n{said}")


@contextlib.contextmanager
def _started(job: Job, folder: Path, *, steps: int, block: int) -> Iterator[_RunningJob]:
    folder.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(job.workers)
    listener.settimeout(LOOK_S)
    variables = {"OMP_NUM_THREADS": "1", "INTERLEAVE_SOCKET": str(folder / "socket"), "INTERLEAVE_BLOCK": str(block)}
    words = job.command(steps, str(folder / "took"))
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            words,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    job_run = _RunningJob(words, folder, listener, process, workers=job.workers)
    try:
        yield job_run
    finally:
        job_run.close()
