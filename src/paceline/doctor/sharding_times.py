"""What sharding a model by rows adds to a step on CPUs, where nothing of it is hidden: gathers, sums, and the copies
around both, in the layers that a run uses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.doctor.measured import ShardingTime
from paceline.parallel.fully_sharded.collectives import ShardCollectives
from paceline.parallel.fully_sharded.sharded_model import ShardedModel, ShardGroup
from paceline.worker.run_member import parts_of

__all__ = ["sharding_times"]

SIDES = (32, 1024)  # of the weights of a unit: 4 KB, where each call counts, and 4 MB
UNITS = 4
REPEATS, SETTLING = 17, 3  # of which so many are not counted


class _Stack(nn.Module):
    """So many layers, which are gathered and summed one by one."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharding_times(worker: paceline.Worker) -> list[ShardingTime]:
    """Measure with all workers, as one replica. All return the same: of each size of a unit what its gather and its
    sum add. Empty with one worker, and on devices that hide them behind compute.
    """
    if worker.workers == 1 or worker.device.type != "cpu":
        return []
    return [_sharding_time(worker, side) for side in SIDES]


def _sharding_time(worker: paceline.Worker, side: int) -> ShardingTime:
    whole, kept, gathered = (_pass_of(worker, side, zero=zero) for zero in (0, 1, 3))
    once, twice = list[float](), list[float]()
    for _ in range(REPEATS):  # in turns, so that a slow moment of the machine slows all three
        whole_s = _seconds(worker, whole)
        once.append(_seconds(worker, kept) - whole_s)
        twice.append(_seconds(worker, gathered) - whole_s)
    added = [max(worker.gather(statistics.median(one[SETTLING:]))) / UNITS for one in (once, twice)]
    gather_s, sum_s = _parted(*(max(0.0, one) for one in added))
    return ShardingTime(num_bytes=4 * side * side, gather_s=gather_s, sum_s=sum_s)


def _parted(once: float, twice: float) -> tuple[float, float]:
    """Seconds of a gather and of a sum: `once` has one of each, `twice` a gather more. Neither is below zero: the
    nearest to both by least squares.
    """
    gather_s = twice - once
    if gather_s < 0:
        return 0.0, (once + twice) / 2
    if gather_s > once:
        return (once + 2 * twice) / 5, 0.0
    return gather_s, once - gather_s


def _pass_of(worker: paceline.Worker, side: int, *, zero: int) -> Callable[[], None]:
    """Return a forward and a backward of one sample; zero=0: of a whole model."""
    torch.manual_seed(0)
    model, x = _Stack(side), torch.randn(1, side)
    sharded: ShardedModel | None = None
    if zero:
        place = parts_of(worker).place
        whole = dist.group.WORLD
        if whole is None:
            raise RuntimeError("a run of several workers has a process group")
        sharded = ShardedModel(
            model,
            rows=ShardGroup(mesh=dist.DeviceMesh.from_group(whole, "cpu"), group=place.group, name="doctor"),
            zero=zero,
            precision="fp32",
            recorder=place.recorder,
            traffic=ShardCollectives(),
            units=[f"layers.{number}" for number in range(UNITS)],
        )

    def run() -> None:
        if sharded is not None:
            sharded.close()
            sharded.before_run(is_last=True, is_void=False)
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def _seconds(worker: paceline.Worker, run: Callable[[], None]) -> float:
    worker.wait()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
