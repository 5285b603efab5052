"""State outside of buffers that a forward or a loss reads again is refused by name; what is only written goes on."""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import functools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from paceline.errors import PlanError
from paceline.plan import Batch, Compute, Gossip, Layout, LocalSGD, ParameterServer, Plan


class Mode(enum.IntEnum):
    FIRST, SECOND = 1, 2


class Keeping(nn.Module):
    """Keeps something in a plain attribute, in the way that its name says."""

    of_all = torch.zeros(6, dtype=torch.float64)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.kept: Any = None
        if way in (
            "a count that acts at once",
            "a count that acts late",
            "a count for a log",
            "a count modulo a number",
        ):
            self.kept = 0
        elif way == "a running mean" or way == "a running mean, in place":
            self.kept = torch.zeros(6, dtype=torch.float64)
        elif way == "a float":
            self.kept = 1.0
        elif way in ("a list of what was", "the first of a list"):
            self.kept = []
        elif way == "the first of a dict":
            self.kept = {}
        elif way == "a ring of what was":
            self.kept = collections.deque(maxlen=4)
        elif way == "an entry of a dict":
            self.kept = {"mean": torch.zeros(6, dtype=torch.float64)}
        elif way == "an object":
            self.kept = types.SimpleNamespace(mean=0.0)
        elif way == "torch's generator":
            self.kept = torch.Generator().manual_seed(3)
        elif way == "Python's generator":
            self.kept = random.Random(3)
        elif way == "numpy's generator":
            self.kept = np.random.default_rng(3)
        elif way == "a running mean, through .data":
            self.kept = torch.zeros(6, dtype=torch.float64)
        elif way in ("each tenth call", "a count in floating point"):
            self.kept = 0 if way == "each tenth call" else 0.0
        elif way == "a lock, a future and an enum":
            self.kept = [threading.Lock(), concurrent.futures.Future(), Mode.FIRST, random.SystemRandom()]
        elif way == "tensors that cannot be written":
            with torch.inference_mode():
                inference = torch.zeros(2)
            self.kept = {"inference": inference, "expanded": torch.zeros(1).expand(6), "calls": 0}
        elif way == "an array":
            self.kept = np.zeros(6)
        self.layer, self.last, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(self.changed(x)))) + 0.1 * self.norm(x)

    def changed(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.way == "a running mean":
            self.kept = 0.9 * self.kept + 0.1 * mean
            return x - self.kept
        if self.way == "a running mean, in place":
            self.kept.lerp_(mean, 0.1)
            return x - self.kept
        if self.way == "a running mean, made when first needed":
            self.kept = mean.clone() if self.kept is None else self.kept.lerp_(mean, 0.1)
            return x - self.kept
        if self.way == "set by the first batch":
            self.kept = mean if self.kept is None else self.kept
            return x - self.kept
        if self.way == "the largest so far":
            largest = x.detach().amax(0)
            self.kept = largest if self.kept is None else torch.maximum(self.kept, largest)
            return x / self.kept.abs()
        if self.way == "a running mean, through .data":
            self.kept.data.mul_(0.9).add_(0.1 * mean)
            return x - self.kept
        if self.way == "each tenth call":
            self.kept += 1
            return x * 2 if self.kept % 10 == 0 else x
        if self.way == "a count in floating point":
            self.kept += 1.0
            return x * 2 if self.kept > 1000 else x
        if self.way == "an attribute of the class":
            Keeping.of_all = 0.9 * Keeping.of_all + 0.1 * mean
            return x - Keeping.of_all
        if self.way == "a float":
            self.kept *= 0.99
            return x * self.kept
        if self.way == "a hidden state":
            before, self.kept = self.kept, mean
            return x if before is None else x + before
        if self.way == "a count that acts at once":
            self.kept += 1
            return x * (1 - 0.5**self.kept)
        if self.way == "a count that acts late":
            self.kept += 1
            return x * 2 if self.kept > 1000 else x
        if self.way == "a count modulo a number":
            self.kept += 1
            return x * 2 if self.kept % 2 else x
        if self.way in ("a list of what was", "a ring of what was"):
            self.kept.append(mean)
            return x - sum(self.kept) / len(self.kept)
        if self.way in ("the first of a list", "the first of a dict"):
            if isinstance(self.kept, list):
                self.kept.append(mean)
            else:
                self.kept[len(self.kept)] = mean
            return x - self.kept[0]
        if self.way == "an entry of a dict":
            self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * mean
            return x - self.kept["mean"]
        if self.way == "an object":
            self.kept.mean = 0.9 * self.kept.mean + 0.1 * float(mean[0])
            return x - self.kept.mean
        if self.way == "an array":
            self.kept += mean.numpy()
            return x - torch.from_numpy(self.kept)
        if self.way == "torch's generator":
            return x * (torch.rand(x.shape, generator=self.kept) > 0.5)
        if self.way == "Python's generator":
            return x * self.kept.random()
        if self.way == "numpy's generator":
            return x * float(self.kept.random())
        if self.way == "kept for a plot":
            self.kept = mean
        elif self.way == "an activation with its gradient" and torch.is_grad_enabled():
            self.kept = self.layer(x)
            self.kept.retain_grad()
            return x + 0 * self.kept
        elif self.way == "a lock, a future and an enum":
            lock, future, mode, generator = self.kept
            with lock:
                self.kept = [lock, concurrent.futures.Future(), Mode(3 - mode), generator]
            if not future.done():
                future.set_result(generator.random())
        elif self.way == "tensors that cannot be written":
            self.kept["calls"] += 1
        elif self.way == "a count for a log":
            self.kept += 1
        elif self.way == "losses for a log":
            self.kept = [*(self.kept or []), float(mean[0])]
        elif self.way == "a cache":
            if self.kept is None or len(self.kept) < x.shape[1]:
                self.kept = torch.arange(x.shape[1], dtype=x.dtype)
            return x * self.kept[: x.shape[1]]
        return x


CARRIED = ["a running mean", "a running mean, in place", "a float", "a hidden state", "a count that acts at once"]
CARRIED += ["set by the first batch", "the largest so far", "a running mean, through .data", "each tenth call"]
CARRIED += ["a count in floating point", "an attribute of the class"]
CARRIED += [
    "a running mean, made when first needed",
    "a count that acts late",
    "a list of what was",
    "a ring of what was",
    "the first of a list",
    "the first of a dict",
    "an entry of a dict",
    "an object",
]
CARRIED += ["an array", "torch's generator", "Python's generator", "numpy's generator", "a count modulo a number"]
HARMLESS = ["kept for a plot", "a count for a log", "losses for a log", "a cache", "a lock, a future and an enum"]
HARMLESS += ["tensors that cannot be written"]
WITH_COUNTS = ["a count that acts late", "each tenth call", "a count in floating point"]
DATA = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH, COMPUTE = Batch(size=8, micro=2), Compute(precision="fp64")


def steps(worker: Any, way: str, *, in_a_loop: bool = False, samples: int = 24) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    model = worker.prepare(Keeping(way))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = None if in_a_loop else worker.stepper(model, optim, F.mse_loss)
    losses: list[float] = []
    try:
        for batch in worker.batches(TensorDataset(DATA[:samples], DATA.flip(1)[:samples]), name=way):
            if step is not None:
                losses.append(float(step(batch)))
                continue
            for x, y in batch:
                worker.backward(F.mse_loss(model(x), y))
            optim.step()
            optim.zero_grad()
            losses.append(float(model.layer.bias.detach().sum()) if worker.plan.layout.shard == 1 else 0.0)
    except PlanError as error:
        return str(error), losses
    statistics: Any = model.norm.running_var  # a trial leaves no trace there
    return "", losses if statistics.is_meta else [*losses, *statistics.tolist()]


def each(worker: Any) -> dict[str, tuple[str, list[float]]]:
    ways = [*CARRIED, *HARMLESS]
    if worker.plan.layout.workers_each == 1:  # where tensors are exchanged in a forward, a trial has no graph
        ways.append("an activation with its gradient")
    return {way: steps(worker, way) for way in ways}


def judge(
    found: dict[str, tuple[str, list[float]]], alone: dict[str, tuple[str, list[float]]], *, is_split: bool
) -> None:
    """Counts are not moved on where workers exchange tensors in a forward."""
    judged = [way for way in CARRIED if not (is_split and way in WITH_COUNTS)]
    wrong = {way: found[way] for way in judged if found[way][1] or "no parameter or buffer" not in found[way][0]}
    wrong |= {way: found[way] for way in found if way not in CARRIED and found[way][0]}
    assert not wrong, wrong
    for way in HARMLESS:
        assert found[way][1] == pytest.approx(alone[way][1], rel=1e-9), way
    assert "seeded for each micro-batch" in found["torch's generator"][0]
    assert is_split or "between steps" in found["a count that acts late"][0]
    assert "register_buffer" in found["a running mean"][0]


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shard=2)], ids=str)
def test_state_that_forward_reads_again_is_refused_before_the_first_step(world: World, layout: Layout) -> None:
    alone = world.one_process(each, Plan(batch=BATCH, compute=COMPUTE))
    assert not [said for said, _ in alone.values() if said]  # one worker is one process
    for found in world(each, 2, Plan(layout=layout, batch=BATCH, compute=COMPUTE), save_at_end=False):
        judge(found, alone, is_split=layout.shard > 1)


@pytest.mark.parametrize("way", ["a running mean", "a hidden state", "torch's generator", "a cache"])
def test_in_a_loop_of_the_script(world: World, way: str) -> None:
    def work(worker: Any) -> tuple[str, list[float]]:
        return steps(worker, way, in_a_loop=True)

    alone = world.one_process(work, Plan(batch=BATCH, compute=COMPUTE))
    plan = Plan(layout=Layout(replicas=2), batch=BATCH, compute=COMPUTE)
    for said, losses in world(work, 2, plan, save_at_end=False):
        assert (way in CARRIED) == ("self.kept" in said) == (not losses), said
        assert said or losses == pytest.approx(alone[1], rel=1e-9)


@pytest.mark.parametrize(
    "sync",
    [LocalSGD(every=2), quick.further(Gossip()), quick.further(ParameterServer()), ParameterServer(staleness=2)],
    ids=str,
)
def test_where_replicas_step_by_themselves_too(world: World, sync: Any) -> None:
    plan = Plan(layout=Layout(replicas=2), sync=sync, batch=BATCH, compute=COMPUTE)
    for way in ("a running mean", "a count that acts late", "kept for a plot"):
        for said, losses in world(functools.partial(steps, way=way), 2, plan, save_at_end=False):
            assert (way in CARRIED) == ("self.kept" in said), said
            assert said or losses


@pytest.mark.parametrize("layout", [Layout(replicas=1, stages=2), quick.further(Layout(replicas=2, stages=2))], ids=str)
@pytest.mark.parametrize(
    "way",
    ["a running mean", quick.further("a ring of what was"), quick.further("an array"), "Python's generator", "a cache"],
)
def test_between_the_units_of_stages(world: World, layout: Layout, way: str) -> None:
    alone = world.one_process(lambda worker: steps(worker, way), Plan(batch=BATCH, compute=COMPUTE))
    plan = Plan(layout=layout, batch=BATCH, compute=COMPUTE)
    for said, losses in world(lambda worker: steps(worker, way), layout.workers or 0, plan, save_at_end=False):
        assert (way in CARRIED) == ("self.kept" in said) == (not losses), said
        assert said or losses == pytest.approx(alone[1][: len(losses)], rel=1e-9)


class Later(nn.Module):
    """Begins to carry a running mean in the evaluation before a late step."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is not None:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            x = x - self.mean
        return self.layer(x)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_state_that_begins_late_is_found_by_a_later_look(world: World, in_a_loop: bool) -> None:
    def work(worker: Any) -> tuple[str, int]:
        torch.manual_seed(0)
        model = worker.prepare(Later())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
        step = None if in_a_loop else worker.stepper(model, optim, F.mse_loss)
        number = 0
        try:
            for number, batch in enumerate(worker.batches(TensorDataset(DATA, DATA), epochs=90)):
                if number == 100:
                    model.mean = torch.zeros(6, dtype=torch.float64)
                if step is not None:
                    step(batch)
                    continue
                for x, y in batch:
                    worker.backward(F.mse_loss(model(x), y))
                optim.step()
                optim.zero_grad()
        except PlanError as error:
            return str(error), number
        return "", number

    plan = Plan(layout=Layout(replicas=2), batch=BATCH, compute=COMPUTE)
    for said, number in world(work, 2, plan, save_at_end=False):
        assert "Later: self.mean" in said
        assert number == 250


def test_state_of_a_module_inside_is_named_and_other_models_are_not_mixed_up(world: World) -> None:
    def work(worker: Any) -> list[str]:
        said: list[str] = []
        for way in ("a cache", "a running mean"):
            model = worker.prepare(nn.Sequential(nn.Linear(6, 6), Keeping(way)))
            step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
            try:
                for batch in worker.batches(TensorDataset(DATA, DATA), name=way):
                    step(batch)
            except PlanError as error:
                said.append(str(error))
        return said

    plan = Plan(layout=Layout(replicas=2), batch=BATCH, compute=COMPUTE)
    for (said,) in world(work, 2, plan, save_at_end=False):
        assert said.startswith("1: self.kept is no parameter or buffer of a prepared model")


class Queued(nn.Module):
    """Reads a buffer that it writes, which has a rule, and keeps a map for a plot."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.plot = x.detach()
        y = self.layer(x - self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y


def assert_trains_alike(world: World, make: Callable[[], nn.Module]) -> None:
    """A model has the losses of one process under replicas and fully sharded."""

    def work(worker: Any) -> list[float]:
        torch.manual_seed(0)
        model = worker.prepare(make())
        step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
        return [float(step(batch)) for batch in worker.batches(TensorDataset(DATA, DATA.flip(1)))]

    alone = world.one_process(work, Plan(batch=BATCH, compute=COMPUTE))
    for layout in (Layout(replicas=2), Layout(shard=2)):
        for found in world(work, 2, Plan(layout=layout, batch=BATCH, compute=COMPUTE), save_at_end=False):
            assert found == pytest.approx(alone, rel=1e-9)


def test_a_buffer_that_is_read_is_not_taken_for_what_is_kept_beside_it(world: World) -> None:
    assert_trains_alike(world, Queued)


@pytest.mark.parametrize("way", ["a running mean", "kept for a plot"])
def test_a_worker_without_a_micro_batch_takes_part(world: World, way: str) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=BATCH, compute=COMPUTE)
    for said, losses in world(lambda worker: steps(worker, way, samples=2), 2, plan, save_at_end=False):
        assert (way in CARRIED) == ("self.kept" in said) == (not losses), said


class Counted(nn.Module):
    """Keeps two things for a log that belong together, and says so where they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.sizes = nn.Linear(6, 6), 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if len(self.sizes) != self.calls:
            raise RuntimeError(f"{len(self.sizes)} sizes of {self.calls} calls")
        self.calls += 1  # another object each time
        self.sizes.append(len(x))  # and this one is changed in place: what it was is not known any more
        return self.layer(x)


def test_what_is_right_only_together_is_not_put_back_in_part(world: World) -> None:
    assert_trains_alike(world, Counted)
