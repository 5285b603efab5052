"""The model of examples/gpt.py on random bytes, for as long as it is let: `paceline run kept_paceline.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gpt

SAMPLES = 4096


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(1)
    text = torch.randint(256, (SAMPLES, gpt.CONTEXT + 1))
    model = worker.prepare(gpt.GPT())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = worker.stepper(model, optim, gpt.next_byte_loss)
    for batch in worker.batches(TensorDataset(text[:, :-1], text[:, 1:]), epochs=1000):
        step(batch)


if __name__ == "__main__":
    paceline.run(train)
