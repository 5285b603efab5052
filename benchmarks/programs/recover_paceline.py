"""The work of `recovery.py` under Paceline: FOLDER WIDTH LEARNING_RATE."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from recover_work import Log, make_data, make_model

import paceline

FOLDER, WIDTH, RATE = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def train(worker: paceline.Worker) -> None:
    model = worker.prepare(make_model(WIDTH))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    step = worker.stepper(model, optim, F.cross_entropy)
    log = Log(FOLDER, worker.rank)
    for batch in worker.batches(make_data(), epochs=1000):
        step(batch)
        log.step(worker.step)


if __name__ == "__main__":
    paceline.run(train)
