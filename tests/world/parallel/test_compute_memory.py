"""What a worker holds while it trains really falls, also on a machine whose disk is the only other place."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from forked import World
from paceline.plan import Batch, Compute, Plan

LAYERS, WIDTH = 20, 1024
WEIGHTS = LAYERS * WIDTH * WIDTH * 4  # bytes
STATE = 2 * WEIGHTS  # of Adam
M_MMAP_THRESHOLD = -3  # of malloc.h


def train(worker: Any) -> dict[str, int]:
    """Return by how many bytes the process's own memory has grown, from before there was a model: at most while it
    trained, and after that; and what of it a save takes. Pages of files are not its own: the system takes them back
    where others need room."""
    # This process is a fork: what its parent had freed would be used again, unseen, and free blocks would be kept.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)
    before = without_files()
    with highest() as seen:
        model = worker.prepare(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
        optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=1e-4))
        step = worker.stepper(model, optim, F.mse_loss)
        x = torch.randn(12, WIDTH)
        for batch in worker.batches(TensorDataset(x, x)):
            step(batch)
    trained = without_files()
    worker.save()
    return {"peak": max(seen) - before, "training": trained - before, "saving": without_files() - trained}


@contextlib.contextmanager
def highest() -> Iterator[list[int]]:
    """A list of what the process's own memory was meanwhile, looked at a thousand times a second: the system keeps a
    high-water mark only of all pages, files' among them."""
    seen, ended = [without_files()], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            seen.append(without_files())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def without_files() -> int:
    return resident("RssAnon") + resident("RssShmem")


def resident(name: str) -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1]) * 1024


def test_adams_state_on_a_disk_leaves_the_workers_memory_and_so_do_copies_for_checkpoints(tmp_path: Path) -> None:
    grown: dict[str, dict[str, int]] = {}
    plans = {"kept": Compute(), "away": Compute(offload="optimizer", offload_path=str(tmp_path / "disk"))}
    for name, compute in plans.items():
        (tmp_path / name).mkdir()
        plan = Plan(batch=Batch(size=4, micro=4), compute=compute)
        (grown[name],) = World(tmp_path / name)(train, 1, plan, save_at_end=False)
    kept, away = grown["kept"], grown["away"]
    assert kept["training"] > 2 * WEIGHTS + STATE  # weights, gradients, state
    assert kept["peak"] > 2 * WEIGHTS + STATE > away["peak"] + 0.1 * STATE
    assert away["training"] < kept["training"] - 0.7 * STATE
    assert kept["saving"] > 0.9 * (WEIGHTS + STATE)  # the copy that is written from
    assert away["saving"] < 0.2 * (WEIGHTS + STATE)
