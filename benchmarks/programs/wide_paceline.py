"""A wide network on a small batch under Paceline: writes JSON with the milliseconds of each step."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from wide_net import Pairs, wide_net

import paceline
from paceline import Batch, Plan

WIDTH, LAYERS, SAMPLES, STEPS = map(int, sys.argv[1:5])
OUT = sys.argv[5]


def train(worker: paceline.Worker) -> None:
    model = worker.prepare(wide_net(WIDTH, LAYERS))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    step = worker.stepper(model, optim, F.mse_loss)
    took, began = [], time.perf_counter()
    for batch in worker.batches(Pairs(WIDTH, STEPS * SAMPLES * worker.workers)):
        worker.report(loss=step(batch))
        now = time.perf_counter()
        took.append(1000 * (now - began))
        began = now
    if worker.is_first:
        Path(OUT).write_text(json.dumps(took))


if __name__ == "__main__":
    paceline.run(
        train,
        workers=2,
        plan=Plan(batch=Batch(size=2 * SAMPLES, micro=SAMPLES)),
        threads=1,
        save_at_end=False,
        tensorboard=False,
    )
