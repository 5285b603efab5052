"""What `paceline.run(fn)` returns when worker 0 is not there any more at the end of an elastic run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from fake_hosts import ended
from paceline.elastic.membership_messages import PREEMPTED
from paceline.errors import LaunchError
from paceline.launch.job.outcome import JobOutcome
from paceline.plan import Job
from paceline.runs.attempt import Attempt
from programs import run

STEPS = 12
TRAIN = """\
import os
import sys

import torch
import torch.nn.functional as F

import paceline
from paceline import Batch, Layout, Plan

SIGNUM, STEP = int(sys.argv[1]), int(sys.argv[2])


def train(worker):
    model = worker.prepare(torch.nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    data = torch.utils.data.TensorDataset(torch.randn(120, 4), torch.zeros(120, dtype=torch.long))
    for batch in worker.batches(data):
        step(batch)
        if worker.rank == 0 and worker.step == STEP:
            os.kill(os.getpid(), SIGNUM)
    return {"rank": worker.rank, "step": worker.step}


if __name__ == "__main__":
    plan = Plan(layout=Layout(replicas=(2, 3)), batch=Batch(size=10, micro=2))
    print("value", paceline.run(train, workers=3, plan=plan))
"""


@pytest.mark.parametrize(
    ("signum", "step"),
    [(signal.SIGTERM, 5), (signal.SIGKILL, STEPS)],
    ids=["it left on the way", "it was lost after the last step"],
)
def test_it_is_the_value_of_the_first_member_at_the_end(signum: int, step: int, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    code, output = run(sys.executable, program, str(int(signum)), str(step))
    assert code == 0, output
    assert "value {'rank': 1, 'step': 12}" in output


def test_a_value_that_is_on_another_host_is_looked_for_in_vain_and_named(tmp_path: Path) -> None:
    attempt = Attempt(Job(workers=2, run_dir=str(tmp_path)), plan=None, command_started=0.0)
    attempt.number = 1
    left, there = (ended(worker, code, host=host) for worker, code, host in ((0, PREEMPTED, "a"), (2, 0, "b")))
    outcome = JobOutcome(state="finished", exit_code=0, exits=(left, there))
    with pytest.raises(
        LaunchError, match=r"no worker was left on this host .* in the run's directory on b: .*attempt_1"
    ):
        attempt.value(outcome)
