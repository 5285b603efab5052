"""Whole runs of replicas that are split, as a user starts them: parity, a worker that hangs, one that is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from programs import PACELINE, checkpoints, child_environment, losses, run

TRAIN = """\
import glob
import json
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Layout, Plan

HOW = sys.argv[1] if len(sys.argv) > 1 else ""
here = {"rank": -1, "step": 0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        if HOW.startswith("hang") and here == {"rank": 1, "step": 6} and not os.path.exists("hung"):
            open("hung", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        return x + self.down(torch.tanh(self.up(x)))


def train(worker):
    here["rank"] = worker.rank
    torch.manual_seed(1)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    model = worker.prepare(nn.Sequential(nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data, epochs=2):
        here["step"] = worker.step
        worker.report(loss=step(batch))
        if HOW == "fail" and worker.rank == 1 and worker.step == 7 and not os.path.exists("failed"):
            while not glob.glob("broken/checkpoints/step_*6/checkpoint.json"):  # which worker 0 makes complete
                time.sleep(0.01)
            open("failed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

        if HOW == "orphan" and worker.rank == 1 and worker.step == 7 and not os.path.exists("failed"):
            open("failed", "w").close()
            os.kill(json.load(open("broken/run.json"))["pid"], signal.SIGKILL)  # the supervisor

        if HOW == "leave" and worker.rank == 0 and worker.step == 6:  # which is saved as the next step is asked for
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    layout = Layout(stages=2) if HOW == "hang-in-stages" else Layout(shard=2)
    plan = Plan(layout=layout, batch=Batch(size=16, micro=4))
    timeout_s = 4.0 if HOW.startswith("hang") else 60.0
    paceline.run(train, workers=2, plan=plan, save_every=3, timeout_s=timeout_s)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_a_worker_that_stops_between_two_gathers_is_named_and_all_begin_again(program: Path) -> None:
    code, output = run(*PACELINE, "run", program, "hang", limit_s=90)
    assert code == 0, output
    assert re.search(
        r"worker 1 .*: both workers start again (at step 2 from this host's memory|from the .* on disk)", output
    )
    said = r"worker 1 \(.*\) is stopped .* has not entered all_gather \d+ \(0\.[012], .*; worker 0 has waited"
    assert re.search(said, output), output


def test_a_stage_that_stops_is_named_with_the_value_that_is_awaited(program: Path) -> None:
    kept_not = ("--set", "plan.guard.snapshot_every=0")  # otherwise all would begin again
    code, output = run(*PACELINE, "run", program, *kept_not, "hang-in-stages", limit_s=90)
    assert code == 1
    # In the middle of its forward: what stage 0 waits for is the gradient of what it has sent.
    said = (
        r"worker 1 \(.*\) is stopped .* has not entered transfer \d+ \(the gradient of an output of 0\.\d .*of "
        r"micro-batch 0.*worker 0 has waited"
    )
    assert re.search(said, output), output


def test_a_killed_run_goes_on_from_its_newest_checkpoint(program: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run(*PACELINE, "run", program, "--run-dir", whole)[0] == 0
    broken = tmp_path / "broken"
    # Without snapshots in memory the run ends, and can go on otherwise.
    kept_not = ("--set", "plan.guard.snapshot_every=0")
    code, output = run(*PACELINE, "run", program, "--run-dir", broken, *kept_not, "fail")
    assert code == 76 and "worker 1" in output
    assert checkpoints(broken) == [3, 6]
    # What goes on may be cut otherwise: one process, here.
    again = (*PACELINE, "run", program, "--run-dir", broken, "--workers", "1", "--set", "plan.layout=layout()", "fail")
    assert run(*again)[0] == 0
    after = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in after}
    assert list(found.values()) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.further
def test_a_killed_supervisor_costs_no_step(program: Path, tmp_path: Path) -> None:
    assert run(*PACELINE, "run", program, "--run-dir", "whole")[0] == 0
    again = (*PACELINE, "run", program, "--run-dir", "broken", "orphan")
    killed = subprocess.run(again, env=child_environment(), cwd=tmp_path, capture_output=True, timeout=90)
    assert killed.returncode == -signal.SIGKILL
    code, output = run(*again)  # at once: it waits until they have saved
    assert code == 0, output
    (saved,) = map(int, re.findall(r"resumed from step (\d+) ", output))
    assert saved >= 7, "they saved nothing: the newest checkpoint of before is of step 6"
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


def test_parity_compares_sharded_plans_with_one_process(program: Path) -> None:
    plans = ("shard=2+zero=1+batch(size=16,micro=4)", "shard=2+zero=3+batch(size=16,micro=4)")
    words = [word for plan in plans for word in ("--plan", plan)]
    code, output = run(*PACELINE, "parity", program, "--workers", "2,4", "--steps", "4", *words, limit_s=140)
    assert code == 0, output
    assert "parity holds" in output and "shard=2+zero=1" in output


def test_parity_compares_plans_with_stages_with_one_process(program: Path) -> None:
    plans = ("stages=2+batch(size=16,micro=4)", "stages=2+schedule=zero-bubble+batch(size=16,micro=4)")
    words = [word for plan in plans for word in ("--plan", plan)]
    code, output = run(*PACELINE, "parity", program, "--workers", "2,4", "--steps", "4", *words, limit_s=140)
    assert code == 0, output
    assert "parity holds" in output and "stages=2+schedule=zero-bubble" in output


def test_a_notice_right_after_a_save_has_all_leave_and_the_next_start_goes_on(program: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(*PACELINE, "run", program, "--run-dir", whole)[0] == 0
    again = (*PACELINE, "run", program, "--run-dir", broken, "--save-every", "1")
    code, output = run(*again, "leave", limit_s=60)
    assert code == 75, output
    assert run(*again)[0] == 0
    assert losses(broken) == pytest.approx(losses(whole), rel=1e-6)
