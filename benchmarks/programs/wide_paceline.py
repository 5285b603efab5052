"""A wide network on a small batch under Paceline: OUT.RANK holds its times."""

import sys

import torch
import torch.nn.functional as F
from measured import Measured
from wide_net import Pairs, wide_net

import paceline
from paceline import Batch, Plan

WIDTH, LAYERS, SAMPLES, STEPS = map(int, sys.argv[1:5])
OUT = sys.argv[5]


def train(worker: paceline.Worker) -> None:
    model = worker.prepare(wide_net(WIDTH, LAYERS))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    step = worker.stepper(model, optim, F.mse_loss)
    measured = Measured()
    for batch in worker.batches(Pairs(WIDTH, STEPS * SAMPLES * worker.workers)):
        worker.report(loss=step(batch))
        measured.step()
    measured.write(OUT, worker.rank)


if __name__ == "__main__":
    paceline.run(
        train,
        workers=2,
        plan=Plan(batch=Batch(size=2 * SAMPLES, micro=SAMPLES)),
        threads=1,
        save_at_end=False,
        tensorboard=False,
    )
