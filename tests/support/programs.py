"""A small training program for tests of starting, the commands that start it, and what its run directory tells.

The program is one file that stays the same however it is started; with the same data and plan it has the same losses on
any number of workers, so that `losses()` of a run can be compared with `reference_losses()`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import warm
from supervised_launch import MARK, Announcements, marked

if TYPE_CHECKING:
    from paceline.testing.network_namespaces import NamespaceHost

__all__ = [
    "GONE_S",
    "PACELINE",
    "STEPS",
    "Announcements",
    "Program",
    "checkpoints",
    "child_environment",
    "command",
    "losses",
    "record",
    "reference_losses",
    "run",
    "started_workers",
    "the_run",
    "write_program",
]

PACELINE = (sys.executable, "-m", "paceline")
LIMIT_S = 120.0  # for any one program
GONE_S = 10.0  # the promise: after a failure or a signal everything is gone by then
LOOK_S = 0.5  # between two looks whether a program that is waited for is still there
STEPS = 8  # of the program, unless told otherwise

TRAIN = '''\
"""Learns which of three numbers is the largest."""

import argparse
import json
import os
import socket
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Plan

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--fail", default="", help="WORKER:STEP")
parser.add_argument("--tell", default="", help="named pipe that each worker writes a line to")
parser.add_argument("--tell-at", type=int, default=6, help="after this step")
options = parser.parse_args()


def tell(worker):
    told = {"rank": worker.rank, "pid": os.getpid(), "argv": sys.argv[1:], "host": socket.gethostname()}
    told["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
    with open(options.tell, "a") as pipe:
        pipe.write(json.dumps(told) + "\\n")


def train(worker):
    torch.manual_seed(1)
    x = torch.randn(48, 6)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    model = worker.prepare(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data, epochs=options.epochs):
        worker.report(loss=step(batch))
        if f"{worker.rank}:{worker.step}" == options.fail:
            raise ValueError(f"worker {worker.rank} has had enough")
        if options.tell and worker.step == options.tell_at:
            tell(worker)
    return {"step": worker.step, "workers": worker.workers}


if __name__ == "__main__":
    value = paceline.run(train, workers=2, plan=Plan(batch=Batch(size=12, micro=3)), save_every=4)
    print("value " + json.dumps(value) + "\\n", end="")
'''


def write_program(folder: Path, *, name: str = "train.py", text: str = TRAIN, workers: int = 2) -> Path:
    """Write the program; `workers` is the number in its own `paceline.run(...)`."""
    path = folder / name
    path.write_text(text.replace("workers=2", f"workers={workers}"))
    return path


class Program:
    """A command in a process group of its own; `marked` tells what is left of it."""

    def __init__(self, process: warm.Running, mark: str) -> None:
        self.process, self.mark = process, mark

    def end(self, *, limit_s: float = LIMIT_S) -> tuple[int, str]:
        """Wait for its end: exit code, and what it wrote on standard output and standard error."""
        output, _ = self.process.communicate(timeout=limit_s)
        return self.process.returncode, output

    def told(self, pipe: Announcements, count: int) -> list[Any]:
        """Wait for what its workers tell; an error with its output when it ends before."""
        found: list[Any] = []
        deadline = time.monotonic() + LIMIT_S
        while len(found) < count:
            try:
                found += pipe.take(1, limit_s=LOOK_S)
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.process.kill()
                    raise AssertionError(f"{len(found)} of {count} workers told something:\n{self.end()[1]}") from None
        return found

    def signal(self, signum: int) -> None:
        """Send a signal to its process group, as a terminal does."""
        os.killpg(self.process.pid, signum)

    def left(self, *, limit_s: float = 0.0) -> list[str]:
        """Its processes that are there now, or, where none has to be, after `limit_s` seconds.

        Paceline's own commands have reaped all when they end; an engine may have killed its last ones only just then.
        """
        deadline = time.monotonic() + limit_s
        while (found := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


@contextlib.contextmanager
def command(
    *words: str | Path,
    environment: dict[str, str] | None = None,
    cold: bool = False,
    host: NamespaceHost | None = None,
    **popen: Any,
) -> Iterator[Program]:
    """Start a command, on a host of `network.two_hosts` where one is given; whatever of it is left in the end is
    killed. `cold`: as a user does, where how it starts is part of the claim; else as a fork that finds its imports
    done, where it is one of those (see `warm`)."""
    mark = uuid.uuid4().hex
    texts = [str(word) for word in words]
    variables = child_environment() | {MARK: mark} | (environment or {})
    process: warm.Running
    if not cold and popen.keys() <= {"cwd", "stdout", "stderr"} and warm.can_start(texts, variables):
        process = warm.start(texts, env=variables, start_new_session=True, host=host, **popen)
    else:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options: dict[str, Any] = {"text": True, "start_new_session": True, **streams, **popen}
        process = subprocess.Popen([*(host.prefix if host else ()), *texts], env=variables, **options)
    try:
        yield Program(process, mark)
    finally:
        for line in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run(*words: str | Path, limit_s: float = LIMIT_S, **more: Any) -> tuple[int, str]:
    """Run a command to its end: exit code and output."""
    with command(*words, **more) as program:
        return program.end(limit_s=limit_s)


def child_environment() -> dict[str, str]:
    """This process's environment, with what it imports from, without what tells of a world or a width."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    python_path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    tools = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    )
    return os.environ | {"PYTHONPATH": python_path, "PATH": tools, "COLUMNS": "160"}


def losses(run_dir: Path) -> list[float]:
    """The loss of each step, from metrics.jsonl; steps that do not count up from 1 are an error."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        raise AssertionError(f"steps in {run_dir / 'metrics.jsonl'}: {[row['step'] for row in rows]}")
    return [row["loss"] for row in rows]


@functools.cache
def reference_losses() -> tuple[float, ...]:
    """The losses of `python train.py` on one worker; run once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        code, output = run(sys.executable, write_program(Path(folder), workers=1), cwd=folder)
        if code != 0:
            raise RuntimeError(f"the program fails on one worker:\n{output}")
        (run_dir,) = Path(folder, "runs").iterdir()
        return tuple(losses(run_dir))


def record(run_dir: Path) -> dict[str, Any]:
    """run.json."""
    return json.loads((run_dir / "run.json").read_text())


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    names = [path.parent.name.removeprefix("step_") for path in run_dir.glob("checkpoints/*/checkpoint.json")]
    return sorted(int(name) for name in names if name.isdecimal())  # one under way may have its mark, but not its name


def started_workers(run_dir: Path, attempt: int = 1) -> list[dict[str, Any]]:
    """What the workers of an attempt said when they started, by worker."""
    files = sorted((run_dir / f"attempt_{attempt}").glob("worker_*/events.jsonl"))
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [event for event in events if event["event"] == "WorkerStarted"]


def the_run(folder: Path) -> Path:
    """The one run in folder/runs."""
    (run_dir,) = (folder / "runs").iterdir()
    return run_dir
