"""`plan="auto"` and `--verify` from a user's command to the end: plans are run, and the fastest is taken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.further
SCRIPT = """
import paceline, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def train(worker):
    torch.manual_seed(1)
    model = worker.prepare(nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]))
    optimizer = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optimizer, F.mse_loss)
    x = torch.randn(256, 64)
    for batch in worker.batches(TensorDataset(x, x), epochs=4):
        step(batch)
    print("trained with", worker.plan)

if __name__ == "__main__":
    paceline.run(train, workers=2, plan="auto+batch(size=64,micro=8)")
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("words", [("train.py",), ("-m", "paceline", "run", "train.py")])
def test_a_script_that_asks_for_auto_is_trained_with_a_plan_that_was_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    env = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    chosen = re.search(r"plan auto: (\S+) \((.*) a step, the fastest of (\d+) that were run\)", said)
    assert chosen is not None, said
    assert int(chosen[3]) >= 3
    assert f"trained with {chosen[1]}" in said
    assert "replaces the script's" not in said
    assert [path.name for path in (tmp_path / "runs").iterdir()] != []
    assert len(list((tmp_path / "runs").iterdir())) == 1, "tried plans leave no run behind"
    assert not list(scratch.glob("paceline-*"))
