"""The process beside a run: what it writes of a script, and which errors become the prediction's problem."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.plan_costs import predict_run
from paceline.plan import CommandPlan, Plan
from paceline.planner.receipt import MeasuredStep
from paceline.planner.run_receipt import RunPrediction

SCRIPT = """
import sys
import paceline, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def train(worker):
    {first}
    model = worker.prepare(nn.Linear(int(sys.argv[1]), 64))
    optimizer = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optimizer, F.mse_loss)
    for batch in worker.batches(TensorDataset(torch.zeros(8, 64), torch.zeros(8, 64))):
        step(batch)

if __name__ == "__main__":
    paceline.run(train, plan="batch(size=8,micro=2)")
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(predict_run, "_step_back", lambda parent: None)  # it is this process, which stays as it is
    (tmp_path / "lab.toml").write_text(
        '[clusters.lab]\ndevice = "rtx-4090"\nhosts = 1\ndevices_per_host = 2\nnetwork_gb_s = 1.0\nsource = "made up"\n'
    )
    return {
        "parent": os.getpid(),
        "run_dir": str(tmp_path),
        "attempt": 3,
        "cluster": str(tmp_path / "lab.toml"),
        "plan": CommandPlan().to_table(),
        "workers": 2,
    }


def predicted(
    asked: dict[str, Any], folder: Path, *, first: str = "", args: Sequence[str] = ("64",), **changes: Any
) -> RunPrediction:
    (folder / "train.py").write_text(SCRIPT.format(first=first))
    assert predict_run.main({**asked, **changes}, [str(folder / "train.py"), *args]) == 0
    made = RunPrediction.read(folder / "prediction.json")
    assert made is not None
    return made


def test_the_scripts_plan_is_predicted_with_the_runs_arguments_and_workers(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    made = predicted(asked, tmp_path)
    assert (made.cluster, made.attempt, made.problem) == (asked["cluster"], 3, "")
    assert made.receipts == str(tmp_path / "lab.receipts.jsonl")
    assert made.made > 1.7e9
    step = made.predicted
    assert step is not None
    assert (step.plan, step.workers, step.micro) == ("replicas=2+batch(size=8,micro=2)", 2, 2)
    assert step.model.startswith("model/4160/")
    assert step.low_s < step.step_s < step.high_s
    assert step.step_s == pytest.approx(sum(step.parts.values()))
    assert (step.corrected_by, step.is_cpu) == (0, False)


def test_the_commands_plan_wins_and_receipts_correct(asked: dict[str, Any], tmp_path: Path) -> None:
    plan = CommandPlan(whole=Plan.parse("shard=2+batch(size=4,micro=2)")).to_table()
    before = predicted(asked, tmp_path, plan=plan).predicted
    assert before is not None and before.plan == "replicas=1+shard=2+batch(size=4,micro=2)"
    measured = MeasuredStep(step_s=0.5, parts={"compute": 0.5}, peak=9e9, steps=40)
    before.receipt(measured).append_to(tmp_path / "lab.receipts.jsonl")
    after = predicted(asked, tmp_path, plan=plan).predicted
    assert after is not None
    assert after.step_s == pytest.approx(0.5, rel=0.01)
    assert after.bytes == pytest.approx(9e9)
    assert (after.corrected_by, after.corrected_of) == (1, "this model on 2 workers")
    assert after.estimated_s == before.estimated_s == before.step_s


@pytest.mark.parametrize(
    ("first", "changes", "says"),
    [
        ("raise KeyError('no data\\nat all')", {}, "the script raised KeyError when it was looked at: 'no data"),
        ("raise SystemExit(3)", {}, "the script ended by itself (exit status 3) when it was looked at"),
        ("return", {}, "What a step of the script costs could not be counted: it prepares no model"),
        ("", {"cluster": "nowhere.toml"}, "Cannot read nowhere.toml"),
        (
            "",
            {"plan": CommandPlan(whole=Plan.parse("compute(precision=fp64)")).to_table()},
            "no rates for precision=fp64",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(
    asked: dict[str, Any], tmp_path: Path, first: str, changes: dict[str, Any], says: str
) -> None:
    made = predicted(asked, tmp_path, first=first, **changes)
    assert made.predicted is None
    assert says in made.problem
    assert "\n" not in made.problem
