"""A training program with an embedding whose gradients are sparse, whose workers are lost at chosen points.

Where they may be lost: `doomed`.

OPTIONS  JSON: plan, sparse, and fields of the Job; pause_s: after each step; until: [step, workers], the loop is left
         after this step when so many are there; held_at: from this step on who comes later is waited for; only where
         replicas have no common step
"""

from __future__ import annotations

import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import Plan
from paceline.checkpoint.async_writer import AsyncWriter
from paceline.comm.remote_tensors import is_remote
from scheduled_kills import FAULTS, OPTIONS, arm, fault, left

ROWS = 211


class Words(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = (ROWS * torch.rand(6, generator=torch.Generator().manual_seed(index)) ** 2).long()
        return words, words.sum() % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 8, sparse=bool(OPTIONS.get("sparse", True)))
        self.layers = nn.Sequential(nn.Linear(8, 4))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.words(words).sum(1).tanh())


def train(worker: paceline.Worker) -> str:
    if FAULTS:
        arm(worker, sums=("gradients", "layers"), save=(AsyncWriter, "_write"))
    torch.manual_seed(1)
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=1.0)
    model.register_forward_pre_hook(lambda *_: fault(worker, "forward"))
    is_newcomer, until, held_at = worker._consensus.is_newcomer, OPTIONS.get("until"), OPTIONS.get("held_at")
    for batch in worker.batches(Words(), epochs=1000):
        if worker.step % 4 == 3:  # before a newcomer's first step, too
            worker.report(held_out=worker.evaluate(model, Words(), F.cross_entropy)["loss"])
        step(batch)
        if is_newcomer:
            left("came").touch()
        time.sleep(float(OPTIONS.get("pause_s", 0)))  # steps are short, and others are to come in the middle of them
        while held_at is not None and worker.step >= held_at and not left("came").exists():
            time.sleep(0.02)  # looks again
        if until is not None and worker.step >= until[0] and worker.workers == until[1]:
            break
    held = is_remote(dict(model.named_parameters())["words.weight"])
    total = sum(float(value.double().abs().sum()) for value in model.state_dict().values())
    told = worker.gather((worker.rank, held, total))
    if worker.is_first:
        left("told.json").write_text(json.dumps(told))
    return "done"


if __name__ == "__main__":
    job = {"max_steps": 14, "tensorboard": False, **OPTIONS.get("job", {})}
    paceline.run(train, plan=Plan.parse(OPTIONS["plan"]), **job)
