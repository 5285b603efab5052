"""What a person sees of bad numbers: one line on the console, an exit code, and an audit that says what was undone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from paceline.monitor.audit.audit import audit
from programs import PACELINE, checkpoints, run, write_program

SPIKY = '''\
"""Learns sums; one sample of step 25 has a target from another world."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Guard, Plan


def train(worker):
    torch.manual_seed(1)
    x = torch.randn(160, 6)
    y = x.sum(1, keepdim=True)
    y[98] = 1e5
    model = worker.prepare(nn.Linear(6, 1))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.mse_loss)
    for batch in worker.batches(TensorDataset(x, y)):
        worker.report(loss=step(batch))
    if worker.rank == 0:
        print("weights are finite:", bool(torch.isfinite(model.weight).all()))


if __name__ == "__main__":
    plan = Plan(batch=Batch(size=4, micro=1, shuffle=False), guard=Guard(on_spike="skip", window=32))
    paceline.run(train, workers=2, plan=plan, save_every=8, tensorboard=False)
'''

JOINED = '''\
"""Loses a worker at step 10, takes another one in, and then sees a spike: all go back to a snapshot from before."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Guard, Layout, Plan


def train(worker):
    torch.manual_seed(1)
    x = torch.randn(64, 6)
    model = worker.prepare(nn.Linear(6, 1))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    began = [value.clone() for value in model.parameters()]

    def is_poisoned():
        return worker.step + 1 >= 50 and (worker.step + 1) % 50 == 0 and worker.workers == 3

    def loss(model, micro):
        return ((model(micro[0]) - 1) ** 2).mean() * (1e6 if is_poisoned() else 1.0)

    step = worker.stepper(model, optim, forward=loss)
    for batch in worker.batches(TensorDataset(x), epochs=10000):
        if worker.rank == 1 and worker.step == 10 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
        is_last = is_poisoned()
        step(batch)
        if is_last:
            break
    same = all(torch.equal(one, other) for one, other in zip(began, model.parameters()))
    told = worker.gather((worker.rank, same, len(optim.state), os.getpid()))
    if worker.is_first:
        Path("told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    guard = Guard(on_spike="rollback", window=16, snapshot_every=1000000, check_every=7)
    plan = Plan(layout=Layout(replicas=(2, 3)), batch=Batch(size=6, micro=1), guard=guard)
    paceline.run(train, workers=3, plan=plan, run_dir="run", tensorboard=False)
'''


FLIPPED = (
    SPIKY.replace("y[98] = 1e5", "")
    .replace("workers=2", "workers=3")
    .replace(
        "        worker.report(loss=step(batch))\n",
        """        worker.report(loss=step(batch))
        if worker.rank == 2 and worker.step == 9:
            model.weight.detach().view(torch.int32)[0, 0] ^= 1 << 20
""",
    )
)


def lines(output: str, word: str) -> list[str]:
    return [line for line in output.splitlines() if word in line]


def started(folder: Path, *words: str, text: str = SPIKY) -> tuple[int, str]:
    program = write_program(folder, text=text)
    return run(*PACELINE, "run", program, "--run-dir", folder / "run", *words, cwd=folder)


def test_a_skipped_spike_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    code, output = started(tmp_path)
    assert code == 0, output
    (line,) = lines(output, "SPIKE")
    assert line.startswith("step 25  SPIKE: loss 2.5e+09, expected at most ")
    assert line.endswith(": no worker takes the step, its samples count as used")
    assert "weights are finite: True" in output
    assert "1 of them skipped" in output


def test_a_rollback_is_one_line_and_the_audit_says_what_was_undone(tmp_path: Path) -> None:
    settings = ("window=32", "snapshot_every=10", "on_spike=rollback")  # the first two are of use beside the last
    code, output = started(tmp_path, *(word for text in settings for word in ("--set", f"plan.guard.{text}")))
    assert code == 0, output
    (line,) = lines(output, "SPIKE")
    assert line.endswith(": rolled back to step 20; steps 21-25 are undone, the samples are not used again")
    code, output = run(*PACELINE, "audit", tmp_path / "run")
    assert code == 0, output
    (undone,) = lines(output, "undone")
    assert undone.strip().startswith("undone    positions 80-99 (20 samples: 80, 81,")
    assert undone.endswith("by a rollback of steps 21-25 to step 20: not used again")


def test_stop_exits_with_1_and_one_sentence_and_can_be_continued(tmp_path: Path) -> None:
    code, output = started(tmp_path, "--set", "plan.guard=guard(on_spike=stop,window=32)")
    assert code == 1, output
    assert "step 25: loss 2.5e+09, expected at most " in output
    assert "Traceback" not in output, output
    assert checkpoints(tmp_path / "run") == [8, 16, 24]
    code, output = started(tmp_path)
    assert code == 0, output
    (line,) = lines(output, "SPIKE")
    assert line.startswith("step 25  SPIKE: "), "what was expected came back with the checkpoint"
    assert audit(tmp_path / "run").verdict == "clean"


def test_a_flipped_bit_is_one_line_with_the_worker_and_the_tensor(tmp_path: Path) -> None:
    guard = ("--set", "plan.guard=guard(check_every=10)")
    code, output = started(tmp_path, *guard, text=FLIPPED)
    assert code == 0, output
    (line,) = lines(output, "WEIGHTS DIFFER")
    assert line.startswith(
        "step 10  WEIGHTS DIFFER from those of 2 others since a step after 8, first in model.weight: "
    )
    assert re.search(r": worker 2 \(.+, pid \d+\); healed from worker 0$", line)
    code, output = started(tmp_path, *guard, "--fresh", text=FLIPPED.replace("workers=3", "workers=1"))
    assert code == 0, output
    assert not lines(output, "WEIGHTS DIFFER")


def test_a_worker_that_joined_later_goes_back_with_the_others(tmp_path: Path) -> None:
    program = write_program(tmp_path, text=JOINED)
    code, output = run(sys.executable, program, cwd=tmp_path)
    assert code == 0, output
    told: list[list[Any]] = json.loads((tmp_path / "told.json").read_text())
    assert [rank for rank, *_ in told] == [0, 1, 2]
    assert all(same for _, same, *_ in told), "the weights are those of the beginning on all, the newcomer included"
    assert all(num_states == 0 for _, _, num_states, _ in told), "and so is the optimizer"
    assert len(lines(output, "SPIKE")) == 1
    assert "joined at step" in output
    judged = audit(tmp_path / "run")
    assert judged.is_clean, judged
    assert {undone.to_step for epoch in judged.epochs for undone in epoch.undone} == {0}
