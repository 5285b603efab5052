"""Runs of `elastic_program.py`, and what must be true of them whatever was done to their workers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lasting
import programs
import warm
from paceline.monitor.audit.audit import audit
from programs import PACELINE, child_environment

__all__ = [
    "LIMIT_S",
    "PROGRAM",
    "Run",
    "assert_unharmed",
    "finish",
    "happened",
    "reached",
    "resized",
    "servers_of",
    "start",
    "trained",
    "undisturbed",
    "until",
]

PROGRAM = Path(__file__).with_name("elastic_program.py")
LIMIT_S = 120  # for any one run


class Run:
    """One run of the program, over."""

    def __init__(self, folder: Path, code: int, output: str) -> None:
        self.folder, self.code, self.output = folder, code, output
        self.run_dir = folder / "run"

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics()]

    def held_out(self) -> list[float]:
        return [row["held_out"] for row in self.metrics() if "held_out" in row]

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "attempt_1" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] in names]

    def workers(self) -> list[int]:
        """Who was there at the end."""
        return sorted(rank for rank, _ in self._told())

    def weights(self) -> float:
        """Their sum; the model and the optimizer are equal on all workers to the last bit."""
        ((_, total),) = {(digest, total) for _, (digest, total) in self._told()}
        return total

    def _told(self) -> list[tuple[int, tuple[str, float]]]:
        return [(rank, tuple(told)) for rank, told in json.loads((self.folder / "weights.json").read_text())]


def start(folder: Path, *faults: dict[str, Any], program: Path = PROGRAM, **options: Any) -> warm.Process:
    """The program, under way in its run directory."""
    folder.mkdir(exist_ok=True)
    environment = child_environment() | {
        "FAULTS": json.dumps(faults),
        "FAULT_DIR": str(folder),
        "OPTIONS": json.dumps({**options, "job": {"run_dir": str(folder / "run"), **options.get("job", {})}}),
    }
    return warm.start([sys.executable, str(program)], env=environment, cwd=folder)


def finish(folder: Path, process: warm.Process) -> Run:
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        events = "".join(path.read_text() for path in sorted((folder / "run").glob("attempt_*/events.jsonl")))
        raise AssertionError(f"the run has not ended after {LIMIT_S} s; its record:\n{events}") from None
    return Run(folder, process.returncode, output)


def reached(run_dir: Path, step: int, process: warm.Process) -> None:
    """Return when a run has committed a step."""
    metrics = run_dir / "metrics.jsonl"
    until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step,
        process,
        f"step {step} was not reached",
    )


def happened(run_dir: Path, event: str, process: warm.Running) -> None:
    """Return when such an event is in the run's record."""
    events = run_dir / "attempt_1" / "events.jsonl"
    until(lambda: events.exists() and f'"{event}"' in events.read_text(), process, f"no {event} has come")


def until(is_so: Callable[[], bool], process: warm.Running, otherwise: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline or process.poll() is not None:
            raise AssertionError(otherwise)
        time.sleep(0.02)


def trained(folder: Path, *faults: dict[str, Any], **options: Any) -> Run:
    return finish(folder, start(folder, *faults, **options))


@functools.cache
def undisturbed(options: str = "{}") -> Run:
    folder = lasting.folder("undisturbed")
    fields = json.loads(options)
    fields.setdefault("plan", "replicas=4+batch(size=20,micro=2)+compute(precision=fp64)")
    run = trained(folder, **fields)
    assert run.code == 0, run.output
    return run


def assert_unharmed(run: Run, like: Run | None = None) -> None:
    """All steps are there, each once, with the losses of an undisturbed run; every sample was used once."""
    like = like or undisturbed()
    assert run.code == 0, run.output
    assert [row["step"] for row in run.metrics()] == [row["step"] for row in like.metrics()], run.output
    assert run.losses() == pytest.approx(like.losses(), rel=1e-9)
    assert run.held_out() == pytest.approx(like.held_out(), rel=1e-9)
    assert run.weights() == pytest.approx(like.weights(), rel=1e-9)
    judged = audit(run.run_dir)
    assert judged.is_clean, judged
    assert judged.verdict == "clean"


def resized(run_dir: Path, replicas: int) -> tuple[int, str]:
    """What `paceline resize` returns and says."""
    code, output = programs.run(*PACELINE, "resize", run_dir, str(replicas))
    return code, output.strip().partition(": ")[2]


def servers_of(run_dir: Path) -> list[int]:
    """The servers that write to the logs of this run's workers."""
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            is_server = (one / "comm").read_text().strip() == "paceline-server"
            if is_server and (one / "fd" / "2").readlink().is_relative_to(run_dir):
                found.append(int(one.name))
        except OSError:  # it has gone meanwhile
            continue
    return found
