"""The work of `long_memory.py`: STEPS RUN_DIR. A tiny model with statistics, a schedule, reports and evaluations."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Plan

STEPS, RUN_DIR = int(sys.argv[1]), sys.argv[2]
EVALUATES_EVERY = 500  # steps


def samples(seed: int) -> TensorDataset:
    numbers = torch.randn(200, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(numbers, numbers[:, :4].argmax(1))


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4))
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=10_000, gamma=0.9))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=1.0)
    held_out = samples(1)

    def accuracy(output: Tensor, labels: Tensor) -> Tensor:
        return (output.argmax(1) == labels).float().mean()

    for batch in worker.batches(samples(0), epochs=STEPS):
        step(batch)
        schedule.step()
        worker.report(lr=schedule.get_last_lr()[0])
        if worker.step % EVALUATES_EVERY == 0:
            worker.report(accuracy=worker.evaluate(model, held_out, accuracy)["loss"])


if __name__ == "__main__":
    paceline.run(
        train,
        workers=2,
        plan=Plan(batch=Batch(size=48, micro=12)),  # four steps of an epoch, and one of 8 samples
        max_steps=STEPS,
        run_dir=RUN_DIR,
        save_every=1000,
    )
