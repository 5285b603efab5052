"""The work of `many_kills.py`, `save_kills.py` and `elastic_churn.py`: FOLDER MODEL PAUSE_S.

FOLDER: which worker stands where. MODEL: "norms" has everything whose state must survive, statistics of batches and
random numbers too; "smooth" has no statistics of four samples and no kinks, which make rounding grow. PAUSE_S: a step
rests.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

FOLDER, MODEL, PAUSE_S = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
FEATURES, WIDTH, CLASSES, SAMPLES = 64, 64, 10, 12_800


def make_model() -> nn.Module:
    torch.manual_seed(1)
    first = nn.Linear(FEATURES, WIDTH, bias=False)  # a bias before the norm would have no gradient but rounding
    middle = [nn.LayerNorm(WIDTH), nn.GELU()] if MODEL == "smooth" else [nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(first, *middle, nn.Dropout(0.2), nn.Linear(WIDTH, CLASSES))


def make_data() -> TensorDataset:
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


class Stand:
    """FOLDER/stand_RANK: which process this worker is, and the last step that it has committed (0: none yet)."""

    def __init__(self, worker_rank: int) -> None:
        self._file = os.open(FOLDER / f"stand_{worker_rank}", os.O_WRONLY | os.O_CREAT, 0o644)

    def at(self, step: int) -> None:
        os.pwrite(self._file, f"{os.getpid():>10} {step:>10}\n".encode(), 0)  # always as long: one replaces another


def train(worker: paceline.Worker) -> None:
    stand = Stand(worker.rank)
    stand.at(0)
    model = worker.prepare(make_model())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(make_data(), epochs=10**6):
        step(batch)
        stand.at(worker.step)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    paceline.run(train)
