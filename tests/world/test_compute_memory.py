"""What a worker holds while it trains really falls, also on a machine whose disk is the only other place."""

from __future__ import annotations

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


def train(worker: Any) -> dict[str, int]:
    """Return by how many bytes the process has grown at its largest, from before there was a model; how much of that is
    its own memory after training, and what of it a save takes. Pages of files are not its own: the system takes them
    back where others need room."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now
    whole, before = resident("VmRSS"), without_files()
    model = worker.prepare(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))))
    optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=1e-4))
    step = worker.stepper(model, optim, F.mse_loss)
    x = torch.randn(12, WIDTH)
    for batch in worker.batches(TensorDataset(x, x)):
        step(batch)
    peak, trained = resident("VmHWM") - whole, without_files()
    worker.save()
    return {"peak": peak, "training": trained - before, "saving": without_files() - trained}


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
    # Not by how much less than the other's: that has temporaries besides, which depend on what was freed before.
    assert kept["peak"] > 2 * WEIGHTS + STATE > away["peak"] + 0.05 * STATE
    assert away["training"] < kept["training"] - 0.7 * STATE
    assert kept["saving"] > 0.9 * (WEIGHTS + STATE)  # the copy that is written from
    assert away["saving"] < 0.2 * (WEIGHTS + STATE)
