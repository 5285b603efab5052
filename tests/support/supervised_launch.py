"""What tests of launching share: a supervisor in a process of its own, its workers' words, and what is left of them.

Run as a program it is that supervisor: `python launching.py OPTIONS`, a JSON object; it says what happens in lines of
JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leaks import PROGRAM_MARK as MARK
from paceline.errors import LaunchError
from paceline.events import Event
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.job.outcome import JobOutcome
from paceline.launch.local import launch
from paceline.launch.supervisor import Observer
from paceline.plan import Plan
from paceline.plan.command_plan import CommandPlan
from paceline.plan.job import Job

SUPPORT = Path(__file__).resolve().parent
ENTRY = "fake_worker:work"
REFUSED = 3  # exit code after a LaunchError


class Said(Observer):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def poll(self) -> None:
        pass

    def say(self, text: str) -> None:
        self.texts.append(text)

    def hush(self) -> None: ...

    def emit(self, event: Event) -> None:
        pass


class Lines:
    """Lines that come through a pipe, each waited for at most so long."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""

    def next(self, *, limit_s: float) -> str | None:
        """The next line; None at the end. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"nothing came within {limit_s} s")
            data = os.read(self._fd, 1 << 16)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def until(self, text: str, *, limit_s: float) -> None:
        """Return when a line with this text has come."""
        while (line := self.next(limit_s=limit_s)) is not None:
            if text in line:
                return
        raise AssertionError(f"the output ended without {text!r}")


class Announcements:
    """A named pipe into which workers write one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # also a writer: it has no end while this is open
        self._lines = Lines(self._fd)

    def take(self, count: int, *, limit_s: float = 60.0) -> list[Any]:
        """Wait for `count` lines."""
        return [json.loads(self._lines.next(limit_s=limit_s) or "") for _ in range(count)]

    def close(self) -> None:
        os.close(self._fd)


class Supervised:
    """A supervisor in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self.process, self.mark = process, mark
        self._lines = Lines(process.stdout.fileno()) if process.stdout is not None else None

    def result(self, *, limit_s: float = 60.0) -> tuple[int, JobOutcome | None, list[str]]:
        """Wait for its end: exit code, outcome, what it said and has not been heard; a LaunchError comes last."""
        outcome, said = None, list[str]()
        while (line := self._next(limit_s)) is not None:
            if "outcome" in line:
                outcome = JobOutcome.from_json(line["outcome"])
            else:
                said += line.values()
        return self.process.wait(limit_s), outcome, said

    def hear(self, text: str, *, limit_s: float = 60.0) -> str:
        """Wait until it says something with `text` in it."""
        while (line := self._next(limit_s)) is not None:
            if text in line.get("say", ""):
                return line["say"]
        raise EOFError(f"it ended without saying {text!r}")

    def _next(self, limit_s: float) -> dict[str, Any] | None:
        line = self._lines.next(limit_s=limit_s) if self._lines is not None else None
        return None if line is None else json.loads(line)

    def left(self, *, limit_s: float = 10.0) -> list[str]:
        """Processes of this supervisor that are still there after `limit_s`; returns as soon as there are none."""
        deadline = time.monotonic() + limit_s
        while (found := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.01)  # nothing tells when a process ends that belongs to nobody here
        return found


def marked(mark: str) -> list[str]:
    """The running processes that carry this mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended; a zombie's environment is empty
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"{folder.name}: {(folder / 'comm').read_text().strip()}")
    return found


@contextlib.contextmanager
def supervised(
    options: dict[str, Any],
    *,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    **popen: Any,
) -> Iterator[Supervised]:
    """Start a supervisor with `options` for `main`; whatever of it is left in the end is killed."""
    mark = uuid.uuid4().hex
    source = str(SUPPORT.parents[1] / "src")
    python_path = os.pathsep.join([source, str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*prefix, sys.executable, __file__, json.dumps(options)]
    variables = {**os.environ, MARK: mark, "PYTHONPATH": python_path, **(environment or {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, **popen}
    process: subprocess.Popen[bytes] = subprocess.Popen[bytes](command, env=variables, **pipes)
    try:
        yield Supervised(process, mark)
    finally:
        for line in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), 9)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def run_job(
    job: Job,
    run_dir: Path,
    *,
    modules: Sequence[str] = (),
    entry: str = ENTRY,
    observer: Observer | None = None,
    **more: Any,
) -> JobOutcome:
    """Run a job of fake workers to its end, supervised by this process."""
    warm = WarmParent.start(modules=modules, entry=entry)
    started = {"attempt": 1, "observer": observer or Said(), "command_started": time.time()}
    return launch(job, run_dir=run_dir, warm=warm, **started, **more)


class _Printer(Observer):
    """An observer that prints lines of JSON, and at every look a blank where the output is a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()

    def poll(self) -> None:
        if self._terminal:
            print(" ", end="", flush=True)

    def say(self, text: str) -> None:
        print(json.dumps({"say": text}), flush=True)

    def hush(self) -> None: ...

    def emit(self, event: Event) -> None:
        pass


def main(options: dict[str, Any]) -> int:
    """`job`: fields of the Job; `run_dir`; `modules`: what the warm parent imports; `plan`."""
    job = Job(**{**options["job"], "args": tuple(options["job"].get("args", ()))})
    modules = options.get("modules", ())
    plan = CommandPlan.of(Plan.parse(options["plan"])) if options.get("plan") else None
    try:
        outcome = run_job(job, Path(options["run_dir"]), modules=modules, plan=plan, observer=_Printer())
    except LaunchError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return REFUSED
    print(json.dumps({"outcome": outcome.to_json()}), flush=True)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
