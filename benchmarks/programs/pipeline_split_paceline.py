"""A model of 12 blocks, one of them three times as heavy, in two pipeline stages, split at every place in turn.

HEAVY WIDTH ROWS ROUNDS OUT: OUT.RANK holds the times of steps by split, in ms; the first split is the automatic one.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

HEAVY, WIDTH, ROWS, ROUNDS, OUT = (*map(int, sys.argv[1:5]), sys.argv[5])
BLOCKS, MICROS = 12, 8


class Block(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * times * WIDTH), nn.Linear(4 * times * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(3 if number == HEAVY else 1) for number in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(worker: paceline.Worker) -> None:
    splits = [[], *([f"blocks.{number}"] for number in range(1, BLOCKS))]
    models = [worker.prepare(Uneven(), stages=split) for split in splits]
    optims = [worker.prepare(torch.optim.SGD(model.parameters(), lr=1e-3)) for model in models]
    steps = [worker.stepper(*both, F.cross_entropy) for both in zip(models, optims, strict=True)]
    count = ROUNDS * len(splits) * MICROS * ROWS
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).repeat(MICROS, 1)
    data = Repeated(x, torch.arange(len(x)) % 8, count)
    took: list[list[float]] = [[] for _ in splits]
    # In another order in each round: a step feels what the one before has left in caches and in the allocator.
    shuffle = random.Random(0)  # the same on both workers
    order = [split for _ in range(ROUNDS) for split in shuffle.sample(range(len(splits)), len(splits))]
    for split, batch in zip(order, worker.batches(data), strict=False):
        began = time.perf_counter()
        steps[split](batch)
        took[split].append(1000 * (time.perf_counter() - began))
    Path(f"{OUT}.{worker.rank}").write_text(json.dumps(took))


class Repeated(TensorDataset):
    """The same few samples again and again: what is measured is computing."""

    def __init__(self, x: Tensor, y: Tensor, count: int) -> None:
        super().__init__(x, y)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__(index % len(self.tensors[0]))


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
