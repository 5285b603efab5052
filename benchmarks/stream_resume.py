"""Resume of a stream against its position: seconds from `worker.batches(...)` to the end of the first step.

    python benchmarks/stream_resume.py [--runs 5]

The stream has 64 lanes. A checkpoint is saved as if all samples before its position had been read, with the states that
the lanes have there, taken up to eight steps before. The run goes on from it on one worker, which opens all lanes. The
same stream without states is read again up to the position: it is measured at smaller ones only. The mixture is of
three streams of 32, 16 and 16 lanes, with weights of 2, 1 and 1.
"""

from __future__ import annotations

import argparse
import functools
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
MIXED = {"web": 32, "prose": 16, "code": 16}  # lanes of each stream of the mixture, and its weight


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


def stand_at(worker: Any, position: int, *, has_state: bool, is_mixed: bool) -> None:
    """Have the stream stand there, as if all steps before it had been made."""
    stream = worker._loop.streams["train"]
    steps = position // BATCH
    each, stateful = steps * (BATCH // LANES), max(0, steps - STATE_STEPS + 1) * (BATCH // LANES)
    sources = list(MIXED.values()) if is_mixed else [LANES]
    states = [
        [source, lane, 0, stateful, {"next": lane + stateful * num_lanes}]
        for source, num_lanes in enumerate(sources)
        for lane in range(num_lanes)
    ]
    more = [0, 0, False] if is_mixed else []
    progress = [[0, [each] * num_lanes, *more] for num_lanes in sources]
    saved = {"progress": progress, "states": states if has_state else [], "ends": []}
    stream._table.load_state_dict(saved, epoch=0, position=steps * BATCH)
    stream.cursor.position = steps * BATCH


def numbers_at(position: int, *, is_mixed: bool) -> set[float]:
    """What the first sample of a step may be: the next number of one of the lanes."""
    sources = MIXED.values() if is_mixed else [LANES]
    each = position // LANES
    return {float(lane + (each + 1) * num_lanes) for num_lanes in sources for lane in range(num_lanes)}


def first_step_s(
    worker: paceline.Worker, lane: type[Lane], position: int | None, *, is_mixed: bool
) -> tuple[float, float]:
    """Take one step; return how long that took, and its first number. `position`: where a checkpoint is then saved."""
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    seen: list[float] = []

    def loss_of(model: nn.Module, micro: Any) -> Tensor:
        seen.append(float(micro[0][0]))
        return (model(micro[0]) ** 2).mean()

    step = worker.stepper(model, optim, forward=loss_of)
    began = time.perf_counter()
    if is_mixed:
        streams = {name: paceline.ShardedStream(lane, shards=shards) for name, shards in MIXED.items()}
        batches = worker.batches(paceline.StreamMixture(streams, weights=MIXED))
    else:
        batches = worker.batches(paceline.ShardedStream(lane, shards=LANES))
    step(next(batches))
    took = time.perf_counter() - began
    if position is not None:
        stand_at(worker, position, has_state=lane is StatefulLane, is_mixed=is_mixed)
        worker.save()
    return took, seen[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = options_of(parser, takes="about 2 minutes", quick={"runs": 1})
    plan = Plan(batch=Batch(size=BATCH, micro=64))
    print("| samples read before | lanes | s to the first step after a resume |\n|---|---|---|")
    large, small = (51_200, 1_024_000, 10_240_000), (51_200, 204_800)
    for lane, is_mixed, position in (
        *((StatefulLane, False, position) for position in large),
        *((StatefulLane, True, position) for position in large),
        *((Lane, False, position) for position in small),
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

                run = functools.partial(first_step_s, lane=lane, is_mixed=is_mixed)
                paceline.run(functools.partial(run, position=position), plan=plan, **settings)
                seconds, first = paceline.run(functools.partial(run, position=None), plan=plan, **settings)
                if first not in numbers_at(position, is_mixed=is_mixed):
                    raise SystemExit(f"the resume at {position:,} began with {first:,.0f}, the next of no lane")
                took.append(seconds)
        kind = "with states" if lane is StatefulLane else "without"
        kind += ", mixed" if is_mixed else ""
        print(f"| {position:,} | {kind} | {statistics.median(took):.3f} |", flush=True)


if __name__ == "__main__":
    main()
