"""A run beside its prediction, from a user's command to the receipt; and what is left where none comes about."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.planner.receipt import read_receipts
from paceline.planner.run_receipt import BEING_MADE, RunPrediction, RunReceipt

SCRIPT = """
import paceline, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def train(worker):
    torch.manual_seed(1)
    {first}
    model = worker.prepare(nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]))
    optimizer = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optimizer, F.mse_loss)
    x = torch.randn(256, 64)
    for batch in worker.batches(TensorDataset(x, x), epochs=100000):
        step(batch)

if __name__ == "__main__":
    paceline.run(train, workers=2, plan="batch(size=64,micro=8)")
"""
CLUSTER = """
[devices.small]
memory_gb = 8.0
memory_gb_s = 20.0
tflops = { bf16 = 0.1, fp32 = 0.1 }
best_matmul = { bf16 = 0.8, fp32 = 0.8 }
attention = { flash = 0.1, vendor = 0.1 }
units = 1
watts = 20
link_gb_s = 4.0
network_gb_s = 1.0
synchronous = true
source = "made up"

[clusters.lab]
device = "small"
hosts = 1
devices_per_host = 2
network_gb_s = 1.25
source = "made up"
"""
LIMIT_S = 100.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "train.py").write_text(SCRIPT.format(first=""))
    return tmp_path


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, said


def until(process: subprocess.Popen[str] | None, holds: Callable[[], object]) -> None:
    """Wait until something holds, while the process runs."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def num_steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def prediction(folder: Path) -> RunPrediction | None:
    return RunPrediction.read(folder / "run" / "prediction.json")


def predictors_of(folder: Path) -> list[str]:
    """The command lines of processes that predict a run in this folder."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has ended
        if "predict_run" in words and str(folder) in words:
            found.append(words)
    return found


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_run_is_predicted_compared_and_teaches_the_next_prediction(folder: Path) -> None:
    process = started(folder, "run", "train.py", "--run-dir", "run")
    until(process, lambda: (made := prediction(folder)) is not None and made.predicted is not None)
    steps = num_steps(folder)
    until(process, lambda: num_steps(folder) > steps + 60)
    process.send_signal(signal.SIGTERM)
    status, said = ended(process)
    assert status == 75, said
    made, receipt = prediction(folder), RunReceipt.read(folder / "run" / "receipt.json")
    assert made is not None and made.predicted is not None
    assert (made.cluster, made.attempt, made.predicted.workers) == ("cluster.toml", 1, 2)
    assert made.predicted.plan == "replicas=2+batch(size=64,micro=8)"
    assert receipt is not None
    assert receipt.not_kept == ""
    assert read_receipts(folder / "cluster.receipts.jsonl") == [receipt.receipt]
    rows = [json.loads(line)["seconds"]["total"] for line in (folder / "run" / "metrics.jsonl").open()]
    assert min(rows) < receipt.receipt.measured_s < max(rows)
    assert f"predicted on cluster.toml: {made.predicted.text}\n" in said
    (line,) = re.findall(r"^  receipt +(a step took .*)$", said, re.MULTILINE)
    assert line == f"{receipt.summary}: paceline report run"
    assert predictors_of(folder) == []

    status, said = ended(started(folder, "plan", "train.py", "--cluster", "cluster.toml"))
    assert status == 0, said
    assert "corrected by 1 receipt of this model on 2 workers on this cluster" in said


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_early_leaves_no_process_and_whole_files(folder: Path, signum: int) -> None:
    (folder / "train.py").write_text(SCRIPT.format(first="__import__('time').sleep(2.0)"))
    process = started(folder, "run", "train.py", "--run-dir", "run")
    until(process, lambda: predictors_of(folder))
    process.send_signal(signum)
    status, said = ended(process)
    assert status in (128 + signal.SIGTERM, -signal.SIGKILL), said
    until(None, lambda: not predictors_of(folder))
    made = prediction(folder)
    assert made is not None and made.predicted is None
    assert made.problem == ("the run ended before it was made" if signum == signal.SIGTERM else BEING_MADE)
    assert not (folder / "run" / "receipt.json").exists()
    assert not (folder / "cluster.receipts.jsonl").exists()
    assert [path.name for path in (folder / "run").glob(".prediction*")] == []


@pytest.mark.further
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("if 'Inspection' in type(worker).__name__: raise KeyError('no data')", "the script raised KeyError"),
        ("if 'Inspection' in type(worker).__name__: raise SystemExit(3)", "the script ended by itself (exit status 3)"),
        ("if 'Inspection' in type(worker).__name__: __import__('os')._exit(4)", "ended with exit status 4"),
    ],
)
def test_a_look_at_the_script_that_fails_leaves_the_run_as_it_is(folder: Path, first: str, says: str) -> None:
    words = ("run", "train.py", "--run-dir", "run", "--max-steps", "300")
    plain, _ = ended(started(folder, *words, "--cluster", "off"))
    losses = losses_of(folder / "run")
    (folder / "run").rename(folder / "plain")
    (folder / "train.py").write_text(SCRIPT.format(first=first))
    status, said = ended(started(folder, *words))
    assert (status, plain) == (0, 0), said
    assert losses_of(folder / "run") == losses
    made = prediction(folder)
    assert made is not None and says in made.problem
    assert not (folder / "run" / "receipt.json").exists()
    assert "receipt" not in said
    assert predictors_of(folder) == []


def losses_of(run: Path) -> list[Any]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]
