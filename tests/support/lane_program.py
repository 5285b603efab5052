"""A training program over a stream in lanes, whose workers are lost at chosen points; a step's loss names its samples.

OPTIONS  JSON: plan, loaders, pause_s (after each step), is_mixed (with another stream), and fields of the Job
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import paceline
from paceline.checkpoint.async_writer import AsyncWriter
from scheduled_kills import FAULTS, OPTIONS, arm, fault
from stream_shards import ShardStream

LENGTHS = [40, 25, 33, 12, 40, 7]


class Doomed(ShardStream):
    """Workers are lost while they read it, too."""

    worker: Any = None

    def shard(self, num_shards: int, index: int) -> ShardStream:
        part = Doomed(self.lengths, shards=self.shards[index::num_shards])
        part.worker = self.worker
        return part

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            if not OPTIONS.get("loaders"):
                fault(self.worker, "data")
            yield item


def train(worker: paceline.Worker) -> None:
    if FAULTS:
        arm(worker, sums=("model.weight",), save=(AsyncWriter, "_write"))
    model = worker.prepare(nn.Linear(1, 1, bias=False))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    model.register_forward_pre_hook(lambda *_: fault(worker, "forward"))

    def named(model: nn.Module, micro: Any) -> tuple[torch.Tensor, int]:
        x, _ = micro
        return (x.double() ** 2).sum() + 0 * model(x).sum(), len(x)  # no two sets of samples have the same sum

    step = worker.stepper(model, optim, forward=named)
    stream = Doomed(LENGTHS)
    stream.worker = worker
    dataset: Any = stream
    if OPTIONS.get("is_mixed"):
        other = ShardStream([60, 9])
        dataset = paceline.StreamMixture({"a": stream, "b": other}, weights={"a": 2, "b": 1}, exhausted="drop")
    for batch in worker.batches(dataset, epochs=2, loaders=OPTIONS.get("loaders", 0)):
        worker.report(loss=step(batch))
        time.sleep(OPTIONS.get("pause_s", 0.0))


if __name__ == "__main__":
    paceline.run(train, plan=OPTIONS["plan"], **OPTIONS["job"])
