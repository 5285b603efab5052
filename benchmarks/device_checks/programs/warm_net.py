"""A small net whose script touches a device while it is imported: plain, looks or opens."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WAY = sys.argv[1]
if WAY == "looks":
    print("devices:", torch.cuda.is_available())
if WAY == "opens" and torch.cuda.is_available():
    print("sum:", float(torch.ones(4, device="cuda").sum()))


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(1)
    net = worker.prepare(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)))
    optim = worker.prepare(torch.optim.AdamW(net.parameters()))
    step = worker.stepper(net, optim, F.cross_entropy)
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    for batch in worker.batches(TensorDataset(x, x[:, :4].argmax(1))):
        worker.report(loss=step(batch))
    if worker.is_first:
        print("DEVICE", worker.device.type)


if __name__ == "__main__":
    paceline.run(train, save_at_end=False)
