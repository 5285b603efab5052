"""A sweep as its user starts it, with real runs: killed or interrupted, it loses no trial and runs none twice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from markdown_pages import blocks
from paceline.monitor.records.run_record import RunRecord
from paceline.pool.pool_state import PoolRecord
from paceline.sweep.sweep_record import SweepRecord

optuna = pytest.importorskip("optuna")
SCRIPT = """
import argparse, time
import torch, paceline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--x", type=float)
parser.add_argument("--steps", type=int)
options = parser.parse_args()


def score(output, target):
    return options.x * len(target), len(target)


def train(worker):
    torch.manual_seed(0)
    model = worker.prepare(nn.Linear(8, 3))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    held_out = TensorDataset(torch.randn(16, 8), torch.arange(16) % 3)
    data = TensorDataset(torch.randn(16 * options.steps, 8), torch.arange(16 * options.steps) % 3)
    for batch in worker.batches(data):
        time.sleep(0.1 / worker.workers)
        step(batch)
        if worker.step % 5 == 0:
            worker.evaluate(model, held_out, {"score": score})


if __name__ == "__main__":
    paceline.run(train, plan="replicas=1-2+batch(size=16)")
"""
STUDY = """
script = "train.py"
arguments = "--x {x} --steps {steps}"

[objective]
metric = "eval/score"
direction = "maximize"

[sampler]
kind = "grid"

[pruner]
kind = "threshold"
lower = 0.5
n_warmup_steps = 2

[parameters]
"""
PACELINE = [sys.executable, "-m", "paceline"]


class StudyFolder:
    """A folder with a study, and what its user types there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.points = folder, list[float]()
        (folder / "train.py").write_text(SCRIPT)

    def write(self, *, steps: int, first: str, points: Sequence[float] = (0.1, 0.6, 0.8)) -> None:
        self.points = list(points)
        (self.folder / "study.toml").write_text(f"{first}\n{STUDY}x = {self.points}\nsteps = {steps}\n")

    @contextlib.contextmanager
    def process(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command in the background; whatever happens, it and what it has started are gone afterwards."""
        process = subprocess.Popen(
            [*PACELINE, *words],
            cwd=self.folder,
            stdout=(self.folder / "out").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(100)

    def until(self, is_so: Callable[[], Any], *, what: str, limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"not {what}: {self.said}"
            time.sleep(0.1)

    @property
    def said(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def runs(self) -> Path:
        return self.folder / "runs" / "study"

    def rows(self) -> list[dict[str, Any]]:
        try:
            return json.loads((self.runs / "sweep.json").read_text())["trials"]
        except FileNotFoundError:
            return []

    def has_values(self, count: int) -> bool:
        return sum(row["value"] is not None for row in self.rows()) >= count

    def are_all_steps_there(self, number: int, count: int) -> bool:
        lines = (self.runs / "trials" / f"trial-{number:04}" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines] == list(range(1, count + 1))

    def check_trials(self, *, steps: int, pool: Path) -> None:
        """All points of the grid, each once and whole, the bad one pruned; and nothing is left."""
        study = optuna.load_study(study_name="study", storage=f"sqlite:///{self.runs / 'optuna.db'}")
        assert sorted(trial.params["x"] for trial in study.trials) == self.points
        for trial in study.trials:
            x = trial.params["x"]
            keys = list(trial.intermediate_values)
            assert list(trial.intermediate_values.values()) == pytest.approx([x] * len(keys))
            if x == 0.1:
                assert (trial.state.name, keys[:2]) == ("PRUNED", [1, 2])
                continue
            assert (trial.state.name, trial.value) == ("COMPLETE", pytest.approx(x))
            assert keys == list(range(1, steps // 5 + 1)), "each evaluation once"
            assert self.are_all_steps_there(trial.number, steps), "no step twice, none left out"
        assert not list((pool / "queue").iterdir())
        for trial in study.trials:
            record = RunRecord.load(self.runs / "trials" / f"trial-{trial.number:04}")
            assert not record.is_alive()
            assert record.parameters == {**trial.params, "steps": steps}


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_killed_in_the_middle_the_sweep_goes_on_with_the_runs_where_they_were(study: StudyFolder) -> None:
    study.write(steps=20, first="slots = 2\nat_once = 2", points=(0.1, 0.8))
    with study.process("sweep", "study.toml") as sweep:
        study.until(lambda: study.has_values(1), what="under way")
        sweep.kill()
        sweep.wait()
    pool = study.runs / "pool"
    study.until(lambda: not PoolRecord.load(pool).is_alive(pool), what="the pool of the killed sweep gone")
    shown = subprocess.run(
        [*PACELINE, "sweep", "study.toml", "--show"], cwd=study.folder, capture_output=True, text=True
    )
    assert "study: killed" in shown.stdout, shown.stderr
    with study.process("sweep", "study.toml") as sweep:
        assert sweep.wait(150) == 0, study.said
    study.check_trials(steps=20, pool=pool)
    assert "best: trial" in study.said
    assert "eval/score 0.8" in study.said
    assert not PoolRecord.load(pool).is_alive(pool), "a pool of its own ends with it"


@pytest.mark.further
@pytest.mark.timeout(300)
def test_ctrl_c_leaves_the_runs_in_their_pool_which_may_be_killed_and_the_next_start_finds_them(
    study: StudyFolder,
) -> None:
    study.write(steps=60, first='pool = "shared"')
    pool = study.folder / "shared"
    with study.process("pool", "shared", "--slots", "2") as serving:
        study.until(lambda: PoolRecord.load(pool).is_alive(pool), what="served")
        with study.process("sweep", "study.toml") as sweep:
            study.until(lambda: study.has_values(2), what="under way")
            sweep.send_signal(signal.SIGINT)
            assert sweep.wait(30) == 130
        assert "stay in the pool" in study.said
        assert any(RunRecord.load(study.runs / row["run_dir"]).is_alive() for row in study.rows()), "it goes on"
        with study.process("sweep", "study.toml") as sweep:
            study.until(lambda: SweepRecord.load(study.runs).pid == sweep.pid, what="the second start under way")
            serving.kill()
            serving.wait()
            study.until(lambda: "the pool does not run" in study.said, what="it says so")
            with study.process("pool", "shared", "--slots", "2"):
                assert sweep.wait(200) == 0, study.said
    study.check_trials(steps=60, pool=pool)


@pytest.mark.further
@pytest.mark.timeout(300)
def test_a_pool_of_its_own_that_is_killed_is_started_again_and_cancelled_trials_go_on_later(study: StudyFolder) -> None:
    study.write(steps=40, first="slots = 2\nat_once = 2")
    pool = study.runs / "pool"
    with study.process("sweep", "study.toml") as sweep:
        study.until(lambda: study.has_values(1), what="under way")
        before = PoolRecord.load(pool).pid
        os.kill(before, signal.SIGKILL)
        study.until(lambda: PoolRecord.load(pool).pid != before, what="started again")
        study.until(lambda: study.has_values(2), what="it goes on")
        sweep.terminate()
        assert sweep.wait(100) == 75, "run it again, as of every run that SIGTERM has ended"
    assert "running trials save and end" in study.said
    paused = [row for row in study.rows() if row["state"] in ("paused", "running", "waiting")]
    assert paused
    cancelled = subprocess.run(
        [*PACELINE, "sweep", "study.toml", "--cancel"], cwd=study.folder, capture_output=True, text=True, timeout=60
    )
    assert cancelled.returncode == 0, cancelled.stderr
    assert "trial-000" in cancelled.stdout
    assert not list((pool / "queue").iterdir())
    with study.process("sweep", "study.toml") as sweep:
        assert sweep.wait(200) == 0, study.said
    study.check_trials(steps=40, pool=pool)


@pytest.mark.further
@pytest.mark.timeout(120)
def test_a_second_sweep_of_a_study_is_refused_while_the_first_one_runs(study: StudyFolder) -> None:
    study.write(steps=400, first="slots = 1\nat_once = 1")
    with study.process("sweep", "study.toml"):
        study.until(study.rows, what="started")
        second = subprocess.run([*PACELINE, "sweep", "study.toml"], cwd=study.folder, capture_output=True, text=True)
        assert second.returncode == 2
        assert "is in use: another process runs this sweep" in second.stderr
        cancelled = subprocess.run(
            [*PACELINE, "sweep", "study.toml", "--cancel"], cwd=study.folder, capture_output=True, text=True
        )
        assert cancelled.returncode == 2
        assert "End it first, by Ctrl-C" in cancelled.stderr


@pytest.mark.further
@pytest.mark.timeout(300)
def test_the_study_of_the_how_to_runs_to_its_end(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs/how-to/sweep-hyperparameters.md"
    for block in blocks(page):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text.replace("trials = 12", "trials = 3"))
    done = subprocess.run([*PACELINE, "sweep", "study.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"best: trial \d with eval/accuracy 0\.\d+", done.stdout)
    assert Path(tmp_path, re.search(r"checkpoint: (\S+)", done.stdout)[1]).is_dir()  # type: ignore[index]
    assert re.search(
        r"run anew: +paceline run --plan 'replicas=1-2\+batch\(size=(32|64)\)' digits_sweep.py", done.stdout
    )
