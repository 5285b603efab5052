"""Whole runs whose layers are cut, as a user starts them: parity, the audit, an export, a worker that stops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from programs import PACELINE, losses, run

TRAIN = """\
import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Layout, Plan

here = {"rank": -1, "step": 0}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        if "hang" in sys.argv and here == {"rank": 1, "step": 6}:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train(worker):
    here["rank"] = worker.rank
    torch.manual_seed(1)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    model = worker.prepare(nn.Sequential(nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=1.0)
    for batch in worker.batches(data, epochs=2):
        here["step"] = worker.step
        worker.report(loss=step(batch))


if __name__ == "__main__":
    plan = Plan(layout=Layout(tensor=2), batch=Batch(size=16, micro=4))
    paceline.run(train, workers=2, plan=plan, save_every=5, timeout_s=4.0 if "hang" in sys.argv else 60.0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def test_parity_holds_for_cut_layers_and_mixtures_and_leaves_out_what_does_not_fit(program: Path) -> None:
    plans = ("tensor=2+batch(size=16,micro=4)", "shard=2+tensor=2+batch(size=16,micro=4)")
    words = [word for plan in plans for word in ("--plan", plan)]
    code, output = run(*PACELINE, "parity", program, "--workers", "2,4", "--steps", "4", *words, limit_s=140)
    assert code == 0, output
    assert "parity holds" in output
    tables = output.split("plan ")
    assert [re.findall(r"^(\d) workers", table, re.MULTILINE) for table in tables[-2:]] == [["2", "4"], ["4"]]
    assert output.count("one process (reference)") == 1, "both plans have the same reference"


def test_a_run_is_audited_exported_and_goes_on_as_one_process(program: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = ("--workers", "1", "--set", "plan.layout=layout()")
    assert run(*PACELINE, "run", program, "--run-dir", whole, *one)[0] == 0
    code, output = run(*PACELINE, "run", program, "--run-dir", cut, "--max-steps", "5")
    assert code == 0 and "tensor=2: 6 layers are split" in output, output
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    assert run(*PACELINE, "export", cut, files[0])[0] == 0
    assert run(*PACELINE, "run", program, "--run-dir", cut, *one)[0] == 0
    code, output = run(*PACELINE, "audit", cut)
    assert code == 0 and "clean" in output, output
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)
    assert run(*PACELINE, "export", whole / "checkpoints" / "step_00000005", files[1])[0] == 0
    found, expected = map(load_file, files)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_worker_that_stops_between_two_sums_is_named(program: Path) -> None:
    kept_not = ("--set", "plan.guard.snapshot_every=0")  # otherwise all would begin again
    code, output = run(*PACELINE, "run", program, *kept_not, "hang", limit_s=90)
    assert code == 1
    said = r"worker 1 \(.*\) is stopped .* has not entered all_reduce \d+ \(.*; worker 0 has waited"
    assert re.search(said, output), output
