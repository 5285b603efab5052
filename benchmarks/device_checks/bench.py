"""What every check is given: the device, a folder to work in, and a place for its rows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from device_checks.rows import Row, Verdict, append
from paceline.errors import PlanError
from paceline.plan import Plan

__all__ = ["Bench", "Refused"]

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
WORKER_LIMIT_S = 120.0


class Refused(Exception):
    """Paceline refuses a plan, and says why."""


class Bench:
    """One check's surroundings. On the CPU everything is small: such a run shows that the check works."""

    def __init__(self, name: str, *, device: str, scratch: Path, rows: Path, command: str) -> None:
        self.name, self.device, self.scratch = name, device, scratch
        self.on_gpu = device == "cuda"
        self._rows, self._command, self._count = rows, command, 0
        self._began = time.monotonic()

    def tell(self, check: str, *, asked: str, measured: str, verdict: Verdict | bool) -> None:
        """Keep a row. `verdict` may be whether what was asked holds."""
        now = time.monotonic()
        word: Verdict = verdict if isinstance(verdict, str) else "holds" if verdict else "does not hold"
        row = Row(
            check=check,
            asked=asked,
            measured=measured,
            verdict=word,
            command=self._command,
            seconds=round(now - self._began, 1),
        )
        self._began = now
        append(self._rows, row)
        print(f"{word}: {check}: {measured} (asked: {asked})", flush=True)

    @contextlib.contextmanager
    def row(self, check: str, *, asked: str) -> Iterator[None]:
        """What goes wrong inside becomes a row, and the check goes on."""
        try:
            yield
        except Refused as why:
            self.tell(check, asked=asked, measured=f"refused: {why}", verdict="skipped")
        except (Exception, SystemExit) as error:  # a check says what came of it, whatever that was
            lines = str(error).strip().splitlines() or [""]
            self.tell(check, asked=asked, measured=f"{type(error).__name__}: {lines[-1][:300]}", verdict="failed")
            print(error, flush=True)

    def folder(self) -> Path:
        """A folder of its own for a run."""
        self._count += 1
        made = self.scratch / str(self._count)
        made.mkdir(parents=True)
        return made

    def job_device(self, workers: int) -> str:
        """The job's device: several workers share the one that is there."""
        return "cpu" if not self.on_gpu else "cuda" if workers == 1 else "cuda-shared"

    def forked(self, train: Callable[[Any], T], plan: str, workers: int = 1, **job: Any) -> list[T]:
        """Train on workers that are forked from this process, which has imported torch and touched no device. Raises
        Refused where the plan is."""
        from forked import WorkersFailed, World

        job = {"threads": 1, "save_at_end": False, "tensorboard": False, "device": self.job_device(workers), **job}
        try:
            parsed = Plan.parse(plan).resolve(workers)
            parsed.require(workers=workers)
            return World(self.folder())(train, workers, parsed, limit_s=WORKER_LIMIT_S, **job)
        except PlanError as error:
            raise Refused(str(error)) from None
        except WorkersFailed as failed:
            said = re.search(r"^paceline\.errors\.PlanError: (.*)$", str(failed), re.MULTILINE)
            if said is not None:
                raise Refused(said[1]) from None
            raise

    def paceline(self, *words: str, limit_s: float, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run the command; returns its exit status and what it said. Everything that it started ends with it."""
        command = [sys.executable, "-m", "paceline", *words]
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            raise RuntimeError(f"paceline {' '.join(words)}: not over after {limit_s:g} s\n{said[-2000:]}") from None
        return process.returncode, said

    def program(self, name: str) -> str:
        """The path of a program of these checks."""
        return str(ROOT / "benchmarks" / "device_checks" / "programs" / name)
