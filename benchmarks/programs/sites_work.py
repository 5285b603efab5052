"""What the programs for far sites share: the work, the same under Paceline and DDP, and a diary of it.

The model and the text are those of `examples/gpt.py`. The learning rate rises and then stays, so that a curve does not
depend on where it is cut off. The clock stands still while the held-out loss is measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows
from paceline.testing.sites import DEVICE

__all__ = ["GPT", "SEED", "WORK", "Diary", "Work", "data", "next_byte_loss", "optimizer", "warm_up"]

SEED = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained, and for how long."""

    steps: int  # at most
    batch: int  # samples of a step, on all workers together
    lr: float
    every: int  # steps from one measurement of the held-out loss to the next
    held_out: int  # windows that it is measured on
    target: float  # held-out loss at which the work is done
    out: str  # where the diaries go, without the worker's number


WORK = Work(**json.loads(sys.argv[1]))


def data() -> tuple[TensorDataset, TensorDataset]:
    """Windows to train on, one for each sample of each step, and windows to be judged by."""
    text, unseen = standard_library()
    return windows(text, WORK.steps * WORK.batch), windows(unseen, WORK.held_out)


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=WORK.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def warm_up(optim: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optim, start_factor=0.02, total_iters=50)


class Diary:
    """A line of JSON for each step of one worker: when it ended, its loss, and what has left this site by then."""

    def __init__(self, number: int) -> None:
        self._path = Path(f"{WORK.out}.{number}")
        self._began, self._bytes = time.perf_counter(), _sent_bytes()

    def step(self, number: int, loss: float) -> None:
        """Note a step that has ended."""
        self._write(step=number, loss=loss)

    def pause(self) -> None:
        """Stop the clock, and the counter of bytes."""
        self._began, self._bytes = time.perf_counter() - self._began, _sent_bytes() - self._bytes

    def resume(self, number: int, held_out: float) -> None:
        """Have both go on, and note what was measured meanwhile."""
        self._began, self._bytes = time.perf_counter() - self._began, _sent_bytes() - self._bytes
        self._write(step=number, held_out=held_out)

    def _write(self, **row: float) -> None:
        row |= {"seconds": time.perf_counter() - self._began, "num_bytes": _sent_bytes() - self._bytes}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _sent_bytes() -> int:
    """What has left this process's site, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == DEVICE:
            return int(counts.split()[8])
    raise SystemExit(f"this process is on no site: it has no device {DEVICE}")
