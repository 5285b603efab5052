"""A tiny model under Paceline that notes when its first step was committed."""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Plan


def train(worker: paceline.Worker) -> None:
    data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
    model = worker.prepare(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data):
        step(batch)
        if worker.is_first and worker.step == 1:
            Path(sys.argv[1]).write_text(str(time.time()))


if __name__ == "__main__":
    paceline.run(train, plan=Plan(batch=Batch(size=64, micro=8)), save_at_end=False)
