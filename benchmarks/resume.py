"""Resume cost against the position in the epoch: seconds from `worker.batches(...)` to its first item, on a dataset of
a billion samples.

    python benchmarks/resume.py [--runs 7]

A checkpoint is saved at the given share of an epoch; the run is continued from it, and only the data's part of the
resume is timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline
from driving.options import options_of
from paceline import Batch, Plan

SAMPLES = 10**9


class Numbers:
    """A billion samples that cost nothing to make."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / SAMPLES]), torch.tensor([0.0])


def first_item_s(worker: paceline.Worker, share: float | None) -> float:
    """Start at `share` of the epoch (None: where the run stands), make one step; return how long that took."""
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    step = worker.stepper(model, optim, nn.functional.mse_loss)
    began = time.perf_counter()
    batches = worker.batches(Numbers())
    batch = next(batches)
    step(batch)
    took = time.perf_counter() - began
    if share is not None:
        # Stand at that share of the epoch, as if all steps before it had been made.
        worker._loop.cursors["train"].position = int(share * SAMPLES) // 64 * 64
        worker.save()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    options = options_of(parser, takes="about 2 minutes", quick={"runs": 1})
    plan = Plan(batch=Batch(size=64, micro=8))
    print("| share of the epoch done | ms to the first step after a resume |\n|---|---|")
    for share in (0.0, 0.25, 0.5, 0.99):
        took = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as scratch:
                settings = {
                    "workers": 1,
                    "threads": 1,
                    "run_dir": str(Path(scratch) / "run"),
                    "tensorboard": False,
                    "save_at_end": False,
                }
                paceline.run(lambda worker, share=share: first_item_s(worker, share), plan=plan, **settings)
                took.append(paceline.run(lambda worker: first_item_s(worker, None), plan=plan, **settings))
        print(f"| {share:.0%} | {1000 * statistics.median(took):.2f} |", flush=True)


if __name__ == "__main__":
    main()
