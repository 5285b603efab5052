"""A slow worker is given less of each step; the losses are those of even shares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.monitor.audit.audit import audit
from programs import run

PROGRAM = """
import sys, time
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import paceline
from paceline import Batch, Plan

def train(worker):
    torch.manual_seed(0)
    model = worker.prepare(torch.nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    model.register_forward_hook(lambda *_: time.sleep(0.03 if worker.rank == 1 else 0.01))
    inputs = torch.randn(240, 4)
    for batch in worker.batches(TensorDataset(inputs, (inputs[:, 0] > 0).long()), epochs=2):
        step(batch)

if __name__ == "__main__":
    plan = Plan(batch=Batch(size=24, micro=2))
    paceline.run(train, workers=2, plan=plan, run_dir=sys.argv[1], balance=sys.argv[1] == "balanced", tensorboard=False)
"""


def test_a_slow_worker_runs_fewer_micro_batches_and_the_losses_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    losses: dict[str, list[float]] = {}
    outputs: dict[str, str] = {}
    for name in ("even", "balanced"):
        code, outputs[name] = run(sys.executable, "train.py", name, cwd=tmp_path)
        assert code == 0, outputs[name]
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(row)["loss"] for row in rows]
    assert losses["balanced"] == pytest.approx(losses["even"], rel=1e-5)
    assert "after step 10 the workers run [" in outputs["balanced"]
    ran = [samples_of_last_step(tmp_path / "balanced", worker) for worker in (0, 1)]
    assert sum(ran) == 24
    assert ran[1] < 12 < ran[0]
    assert audit(tmp_path / "balanced").verdict == "clean"


def samples_of_last_step(run_dir: Path, worker: int) -> int:
    lines = (run_dir / "attempt_1" / f"worker_{worker}" / "ledger.jsonl").read_text().splitlines()
    return sum(stop - start for start, stop in json.loads(lines[-1])["ranges"])
