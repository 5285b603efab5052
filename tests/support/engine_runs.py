"""Runs that are given to an engine in tests: a program, the command on the submitting host, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from network_hosts import NamespaceHost

__all__ = ["Submitted", "login_command", "losses", "one_machine", "submitted", "until", "write_program"]

LIMIT_S = 120.0
PROGRAM = """
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

X = torch.randn({samples}, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.abs().sum(dim=1).long() % 3)


def forward(model, micro):
    if not os.path.exists("hurry"):
        time.sleep({sleep_s})  # a step lasts, so that the test can act in the middle of it
    return F.cross_entropy(model(micro[0]), micro[1])


def train(worker):
    torch.manual_seed(3)
    model = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=forward)
    for batch in worker.batches(DATA):
        if os.path.exists("fail"):
            raise RuntimeError("as asked")
        worker.report(loss=step(batch))


if __name__ == "__main__":
    paceline.run(train)
"""


def write_program(folder: Path, *, samples: int = 480, sleep_s: float = 0.02) -> Path:
    """Write a training script of `samples / 24` steps; with a file `fail` beside it, it fails, and with
    `hurry` it sleeps no more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(PROGRAM.format(samples=samples, sleep_s=sleep_s))
    return path


def until(holds: Callable[[], Any], what: str, *, limit_s: float = LIMIT_S) -> Any:
    """Return what `holds` returns once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.05)  # files tell nobody
    return found


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "step" in row and "loss" in row}


def one_machine(program: Path, run_dir: Path, *options: str) -> dict[int, float]:
    """The losses of the same program on one worker."""
    words = [sys.executable, "-m", "paceline", "run", str(program), "--run-dir", str(run_dir), *options]
    done = subprocess.run(words, cwd=program.parent, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    return losses(run_dir)


def login_command(
    login: NamespaceHost, *words: str, folder: Path, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Give a paceline command on the submitting host, and wait for its end."""
    return subprocess.run(
        [*login.prefix, sys.executable, "-m", "paceline", *words],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


class Submitted:
    """A `paceline run --on ...` that is followed in the background."""

    def __init__(
        self,
        login: NamespaceHost,
        program: Path,
        options: Sequence[str],
        *,
        run_dir: Path,
        env: Mapping[str, str],
        files: Path | None = None,
    ) -> None:
        """`files`: where the run's files are, if not in the run directory of the submitting host."""
        self.files = files or run_dir
        self.login, self.folder, self.run_dir, self.env = login, program.parent, run_dir, dict(env)
        self._log = (self.folder / f"{run_dir.name}.console").open("w+")
        words = ["run", str(program), *options, "--run-dir", str(run_dir)]
        self.process = subprocess.Popen(
            [*login.prefix, sys.executable, "-m", "paceline", *words],
            cwd=self.folder,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def record(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.files / "run.json").read_text()))
        return {}

    def step(self) -> int:
        """The newest step that is recorded."""
        with contextlib.suppress(OSError, ValueError):
            return max(losses(self.files), default=0)
        return 0

    def until_step(self, step: int, *, limit_s: float = LIMIT_S) -> None:
        until(lambda: self._is_there(step), f"step {step}", limit_s=limit_s)

    def _is_there(self, step: int) -> bool:
        if self.process.poll() is not None and self.step() < step:
            raise RuntimeError(f"it ended with {self.process.returncode}:\n{self.output}")
        return self.step() >= step

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Give a paceline command about this run, where it was submitted."""
        return login_command(self.login, words[0], str(self.run_dir), *words[1:], folder=self.folder, env=self.env)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        return self.process.wait(limit_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextlib.contextmanager
def submitted(
    login: NamespaceHost,
    program: Path,
    *options: str,
    run_dir: Path,
    env: Mapping[str, str] | None = None,
    files: Path | None = None,
) -> Iterator[Submitted]:
    """Submit, and end what is left of it."""
    run = Submitted(login, program, options, run_dir=run_dir, env=env or {}, files=files)
    try:
        yield run
    finally:
        run.close()
