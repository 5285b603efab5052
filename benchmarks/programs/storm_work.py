"""The work of `storms.py` and `drill_table.py`: FOLDER MODEL EPOCHS PAUSE_S LOADERS. A run takes seconds.

FOLDER: which worker stands where, and what is planted: `loader_fault` (the next sample that is read raises an error)
and `slow_disk` (each file that is made durable takes so many seconds). MODEL: "gpt" can be split in every way, "moe"
has routed experts. LOADERS: processes that read samples, of each worker.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

FOLDER, MODEL, EPOCHS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
PAUSE_S, LOADERS = float(sys.argv[4]), int(sys.argv[5])
WORDS, WIDTH, LENGTH, SAMPLES = 16, 16, 8, 240
PLANTED = "the planted error of a loader"


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sequences, and the same one word further; one of them is broken once where that is planted."""

    def __init__(self) -> None:
        self.words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.words[:, 1::2] = (self.words[:, 0:-1:2] + 1) % WORDS  # something to learn

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        planted = FOLDER / "loader_fault"
        if planted.exists():
            try:
                planted.rename(FOLDER / "loader_fault.came")  # of several loaders one has it
            except FileNotFoundError:
                return self[index]
            raise RuntimeError(PLANTED)
        return self.words[index, :-1], self.words[index, 1:]


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        heads = self.query_key_value(self.first(x)).view(samples, length, 3 * self.heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.drop(self.mlp(self.second(x)))


class Experts(nn.ModuleList):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            rows, slot = torch.where(index == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slot, None])
        return out


class Routed(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count)
        self.experts = Experts(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.router(tokens).softmax(1).topk(2, dim=1)
        return x + self.experts(tokens, index, weights).view_as(x)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    blocks = [Block() if MODEL == "gpt" else Routed() for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def next_word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Stand:
    """FOLDER/stand_RANK: which process this worker is, and the last step that it has committed (0: none yet)."""

    def __init__(self, worker_rank: int) -> None:
        self._file = os.open(FOLDER / f"stand_{worker_rank}", os.O_WRONLY | os.O_CREAT, 0o644)

    def at(self, step: int) -> None:
        os.pwrite(self._file, f"{os.getpid():>10} {step:>10}\n".encode(), 0)  # always as long: one replaces another


def slowed(durable: Callable[[int], None]) -> Callable[[int], None]:
    """`os.fsync` on a disk that is slow for as long as FOLDER/slow_disk is there."""

    def fsync(file: int) -> None:
        if (FOLDER / "slow_disk").exists():
            time.sleep(0.3)
        durable(file)

    return fsync


def train(worker: paceline.Worker) -> None:
    os.fsync = slowed(os.fsync)
    stand = Stand(worker.rank)
    stand.at(0)
    model = worker.prepare(make_model())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=3e-3))
    step = worker.stepper(model, optim, next_word_loss, clip_norm=1.0)
    for batch in worker.batches(Samples(), epochs=EPOCHS, loaders=LOADERS):
        worker.report(loss=step(batch))
        stand.at(worker.step)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    paceline.run(train)
