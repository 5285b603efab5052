"""A model on workers whose computing is a wait, as of an accelerator; the last worker's may take longer: OUT.RANK has
when each of its batches ended.

OUT WAIT_S TIMES WIDTH SAMPLES, where TIMES is how many times as long the last worker waits.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

OUT, WAIT_S, TIMES = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
WIDTH, SAMPLES = int(sys.argv[4]), int(sys.argv[5])


class Computing(nn.Module):
    """Does nothing for so long."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.wait_s)  # what an accelerator would need, without the host's cores
        return x


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(0)
    wait_s = WAIT_S * (TIMES if worker.rank == worker.workers - 1 else 1.0)
    x = torch.randn(SAMPLES, 16)
    model = worker.prepare(nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), Computing(wait_s), nn.Linear(WIDTH, 4)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = worker.stepper(model, optim, nn.functional.cross_entropy)
    ends: list[float] = []
    for batch in worker.batches(TensorDataset(x, x[:, :4].argmax(dim=1))):
        step(batch)
        ends.append(time.monotonic())
    Path(f"{OUT}.{worker.rank}").write_text(json.dumps(ends))


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
