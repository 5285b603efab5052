"""Resume of a stream against its position: seconds from `worker.batches(...)` to the end of the first step.

    python benchmarks/stream_resume.py [--runs 5]

The stream has 64 lanes. A checkpoint is saved as if all samples before its position had been read, with the states that
the lanes have there, taken up to eight steps before. The run goes on from it on one worker, which opens all lanes. The
same stream without states is read again up to the position: it is measured at smaller ones only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from driving.options import options_of
from paceline import Batch, Plan

LANES, BATCH, STATE_STEPS = 64, 512, 8


class Lane:
    """A shard of numbers; with a state, or without."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self.next, self.step = shard, num_shards

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            self.next += self.step
            yield torch.tensor([float(self.next)]), torch.tensor([0.0])


class StatefulLane(Lane):
    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def stand_at(worker: Any, position: int, *, has_state: bool) -> None:
    """Have the stream stand there, as if all steps before it had been made."""
    stream = worker._loop.streams["train"]
    steps = position // BATCH
    each, stateful = steps * (BATCH // LANES), max(0, steps - STATE_STEPS + 1) * (BATCH // LANES)
    states = [[0, lane, 0, stateful, {"next": lane + stateful * LANES}] for lane in range(LANES)]
    saved = {"progress": [[0, [each] * LANES]], "states": states if has_state else [], "ends": []}
    stream._table.load_state_dict(saved, epoch=0, position=steps * BATCH)
    stream.cursor.position = steps * BATCH


def first_step_s(worker: paceline.Worker, lane: type[Lane], position: int | None) -> tuple[float, float]:
    """Take one step; return how long that took, and its first number. `position`: where a checkpoint is then saved."""
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    seen: list[float] = []

    def loss_of(model: nn.Module, micro: Any) -> Tensor:
        seen.append(float(micro[0][0]))
        return (model(micro[0]) ** 2).mean()

    step = worker.stepper(model, optim, forward=loss_of)
    began = time.perf_counter()
    batches = worker.batches(paceline.ShardedStream(lane, shards=LANES))
    step(next(batches))
    took = time.perf_counter() - began
    if position is not None:
        stand_at(worker, position, has_state=lane is StatefulLane)
        worker.save()
    return took, seen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = options_of(parser, takes="about 2 minutes", quick={"runs": 1})
    plan = Plan(batch=Batch(size=BATCH, micro=64))
    print("| samples read before | lanes | s to the first step after a resume |\n|---|---|---|")
    for lane, position in (
        *((StatefulLane, position) for position in (51_200, 1_024_000, 10_240_000)),
        *((Lane, position) for position in (51_200, 204_800)),
    ):
        took = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory() as scratch:
                settings: dict[str, Any] = {
                    "workers": 1,
                    "threads": 1,
                    "run_dir": str(Path(scratch) / "run"),
                    "tensorboard": False,
                    "save_at_end": False,
                }

                def run(worker: paceline.Worker, lane: type[Lane] = lane, at: int | None = None) -> tuple[float, float]:
                    return first_step_s(worker, lane, at)

                paceline.run(lambda worker, at=position, run=run: run(worker, at=at), plan=plan, **settings)
                seconds, first = paceline.run(run, plan=plan, **settings)
                if first != position + LANES:  # lane 0 goes on with its next number
                    raise SystemExit(f"the resume at {position:,} began with {first:,.0f}, not {position + LANES:,}")
                took.append(seconds)
        kind = "with states" if lane is StatefulLane else "without"
        print(f"| {position:,} | {kind} | {statistics.median(took):.3f} |", flush=True)


if __name__ == "__main__":
    main()
