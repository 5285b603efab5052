"""Trackers of real runs: one run over restarts, resumes and worlds of other launchers, and no harm where they fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs import child_environment, record

SCRIPT = """\
import json, os, signal, sys
from pathlib import Path
import torch, paceline
from torch.nn import functional
from torch.utils.data import TensorDataset

class Kept:
    def __init__(self):
        self.last = None

    def write(self, **said):
        with open("logged.jsonl", "a") as file:
            file.write(json.dumps(said) + "\\n")

    def start(self, run):
        self.write(start=run.name, attempt=run.attempt, plan=run.plan, arguments=dict(run.arguments))
        lines = [json.loads(line) for line in Path("logged.jsonl").read_text().splitlines()]
        return max([line["step"] for line in lines if "step" in line], default=None)

    def log(self, points):
        for point in points:
            self.write(step=point.step, **point.values)

    def end(self, state):
        self.write(end=state)

def train(worker):
    torch.manual_seed(1)
    model = worker.prepare(torch.nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, functional.cross_entropy)
    data = TensorDataset(torch.randn(96, 4), torch.randint(2, (96,)))
    is_long = "--long" in sys.argv
    for batch in worker.batches(data, epochs=10 if is_long else 1):
        worker.report(loss=step(batch), lr=0.1)
        is_there = worker.rank == 1 and worker.step == (100 if is_long else 5)
        if is_there and "--kill" in sys.argv and not os.path.exists("killed"):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    plan = os.environ.get("LAYOUT", "replicas=2") + "+batch(size=8)"
    every = 2 if "--save" in sys.argv else None
    paceline.run(train, workers=2, plan=plan, loggers=[Kept()], run_dir="run", save_every=every)
"""


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        words, cwd=folder, env=child_environment() | environment, capture_output=True, text=True, timeout=120
    )


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]


def marks(lines: list[dict[str, Any]]) -> list[str]:
    """What began and ended, in order."""
    return [line.get("start") or line["end"] for line in lines if "start" in line or "end" in line]


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.further
@pytest.mark.thorough
def test_a_run_whose_workers_begin_again_is_logged_once(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "train.py", "--kill", "--long", "--max", "8", LAYOUT="shard=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(record(tmp_path / "run")["attempts"]) == 2, "the loss had all begin again"
    lines = logged(tmp_path)
    begin = {"start": "run", "attempt": 1, "arguments": {"kill": "true", "long": "true", "max": "8"}}
    assert begin.items() <= lines[0].items() and "shard=2" in lines[0]["plan"]
    assert steps(lines) == list(range(1, 121))
    assert {"lr", "samples_per_second", "seconds/total"} <= lines[1].keys()
    assert marks(lines) == ["run", "finished"]


@pytest.mark.further
def test_a_run_that_is_resumed_takes_steps_again_and_they_are_logged_once(tmp_path: Path) -> None:
    for exit_code in (76, 0):
        done = run(tmp_path, sys.executable, "train.py", "--kill", "--save")
        assert done.returncode == exit_code, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert next(row["step"] for row in rows if row["attempt"] == 2) == 5, "step 5 was taken twice"
    lines = logged(tmp_path)
    assert steps(lines) == list(range(1, 13))
    assert marks(lines) == ["run", "failed", "run", "finished"]


@pytest.mark.further
def test_a_world_of_torchrun_is_logged_by_its_first_worker(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = logged(tmp_path)
    assert steps(lines) == list(range(1, 13))
    assert marks(lines) == ["run", "finished"]


@pytest.mark.further
def test_a_tracker_without_a_login_costs_one_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "paceline", "run", "train.py", "--log", "wandb", "--run-dir", "run"]
    done = run(tmp_path, *words, WANDB_MODE="online", WANDB_API_KEY="", HOME=str(tmp_path), NETRC=str(tmp_path / "no"))
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert shown.count("warning: nothing more is logged to wandb:") == 1, shown
    assert record(tmp_path / "run")["state"] == "finished"
