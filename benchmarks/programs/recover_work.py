"""What the programs of `recovery.py` have in common: a model, its data, and a file for the steps of each process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH, FEATURES, CLASSES, SAMPLES = 128, 256, 10, 12_800
SAVE_EVERY = 5  # steps: for those that need a checkpoint to recover


def make_model(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def make_data() -> TensorDataset:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


def share(data: TensorDataset, step: int, index: int, workers: int) -> tuple[Tensor, Tensor]:
    """A worker's samples of a step (from 0), for programs that deal them out themselves."""
    each = BATCH // workers
    first = step * BATCH + index * each
    rows = torch.arange(first, first + each) % SAMPLES
    x, y = data.tensors
    return x[rows], y[rows]


class Log:
    """RANK_PID.log in a folder: a line for each committed step, when it was and which."""

    def __init__(self, folder: Path, worker_rank: int) -> None:
        self._file = open(folder / f"{worker_rank}_{os.getpid()}.log", "a", buffering=1)  # noqa: SIM115

    def step(self, number: int) -> None:
        self._file.write(f"{time.time():.6f} {number}\n")
