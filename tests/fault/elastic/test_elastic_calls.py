"""What a program of an elastic run may ask of the others, and what torch.distributed says there instead of its own."""

from __future__ import annotations

import json
from pathlib import Path

from programs import PACELINE, run

TRAIN = """\
import json
import os
import signal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import all_gather_object

import paceline
from paceline import Batch, Layout, Plan


def said_by(call):
    try:
        return call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def train(worker):
    model = worker.prepare(torch.nn.Linear(4, 2))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    data = torch.utils.data.TensorDataset(torch.randn(400, 4), torch.zeros(400, dtype=torch.long))
    for batch in worker.batches(data):
        step(batch)
        if worker.rank == 0 and worker.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # it leaves, and nobody comes in its place
    told = {
        "members": worker.gather(worker.rank),
        "all_reduce": said_by(lambda: dist.all_reduce(torch.ones(1))),
        "all_gather_object": said_by(lambda: all_gather_object([None] * 2, worker.rank)),
        "get_rank": said_by(lambda: dist.get_rank()),
        "new_group": said_by(lambda: dist.new_group([1, 2])),
        "is_initialized": dist.is_initialized(),
    }
    if worker.is_first:
        with open("told.json", "w") as file:
            json.dump(told, file)


if __name__ == "__main__":
    paceline.run(train, workers=3, plan=Plan(layout=Layout(replicas=(2, 3)), batch=Batch(size=10, micro=2)))
"""


def test_workers_are_named_by_their_ranks_and_torch_distributed_says_what_to_call_instead(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    code, output = run(*PACELINE, "run", program)
    assert code == 0, output
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["members"] == [1, 2]
    for name, instead in (
        ("all_reduce", "worker.average(x)"),
        ("all_gather_object", "worker.gather(x)"),
        ("get_rank", "worker.rank"),
        ("new_group", "worker.gather(x)"),
    ):
        assert told[name].startswith(f"RuntimeError: torch.distributed.{name}() has no process group here"), told[name]
        assert f"Use {instead}" in told[name] and "Layout(replicas=n)" in told[name]
    assert told["is_initialized"] is False
