"""The demo model, or a tiny one that takes steps at a given pace, until it is stopped: what a live page is shown."""

import argparse
import functools
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

SAMPLES = 16  # of a step
MANY = 1_000_000  # steps: it is stopped long before


def train(worker: paceline.Worker, pause_s: float) -> None:
    if pause_s:
        model: nn.Module = worker.prepare(nn.Linear(8, 1))
        x = torch.randn(SAMPLES * 100, 8, generator=torch.Generator().manual_seed(0))
        data, loss, epochs = TensorDataset(x, x[:, :1]), F.mse_loss, MANY // 100
    else:
        model = worker.prepare(GPT(128, 4, 4))
        data, loss, epochs = windows(standard_library()[0], SAMPLES * 1000), next_byte_loss, MANY // 1000
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4))
    step = worker.stepper(model, optim, loss, clip_norm=1.0)
    for batch in worker.batches(data, epochs=epochs):
        worker.report(loss=step(batch))
        time.sleep(pause_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step of a tiny model; 0: the demo model")
    paceline.run(functools.partial(train, pause_s=parser.parse_args().pause_s))
