"""A run for `benchmarks/pool_here.py`, which says how many steps it takes: `paceline run pooled.py --max-steps N`."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

SIDE = 768


def main(worker: paceline.Worker) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(SIDE, SIDE), nn.Tanh())]
    model = worker.prepare(nn.Sequential(*layers, nn.Linear(SIDE, 10)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    step = worker.stepper(model, optim, F.cross_entropy)
    data = TensorDataset(torch.randn(2048, SIDE), torch.arange(2048) % 10)
    for batch in worker.batches(data, epochs=1 << 20):
        step(batch)


if __name__ == "__main__":
    paceline.run(main, plan="replicas=1-2+batch(size=512,micro=32)")
