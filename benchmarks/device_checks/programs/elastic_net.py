"""A net with dropout, one of whose workers kills itself once: WHERE FOLDER."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WHERE, FOLDER = sys.argv[1], Path(sys.argv[2])
WORKER, STEP = 2, 5


def strike(worker: paceline.Worker, where: str) -> None:
    marker = FOLDER / "struck"
    if where == WHERE and worker.rank == WORKER and worker.step >= STEP and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(16, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    )
    net[3].register_full_backward_hook(lambda *_: strike(worker, "backward"))
    model = worker.prepare(net)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    x = torch.randn(960, 16, generator=torch.Generator().manual_seed(0))
    for batch in worker.batches(TensorDataset(x.double(), x[:, :8].argmax(1)), epochs=10):
        worker.report(loss=step(batch))
        strike(worker, "committed")


if __name__ == "__main__":
    paceline.run(train, save_at_end=False)
