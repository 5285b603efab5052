"""Replicas that do not wait for each other: whole batches in turns, each sample once, and no update too far behind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from async_runs import THREADS, asynchronous, steps_of, weights_of
from forked import WorkersFailed, World
from layout_runs import (
    EXACT,
    RESUME,
    WORDS,
    Net,
    Text,
    assert_same,
    next_word,
    plan_of,
    train,
    twice,
    without_dropout,
)
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Layout, ParameterServer, Plan
from paceline.schedule.sample_order import sample_indices
from paceline.sync.parameter_server.async_server import AsyncServer
from paused_workers import wait_for


def test_one_replica_that_takes_all_turns_is_one_process(world: World) -> None:
    results = world(without_dropout, 1, asynchronous(1), **THREADS)
    assert_same(results, world.one_process(without_dropout, plan_of(Layout()), **THREADS))


def gated(folder: Path) -> Callable[[Any], dict[str, Any]]:
    """Worker 1 stands still in its first batch until worker 0 has done twelve."""

    def run(worker: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = worker.prepare(Net(0.0))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, next_word)
        steps: list[int] = []
        for batch in worker.batches(Text(), epochs=5):  # 20 steps
            if worker.rank == 1 and not steps:
                (folder / "held").touch()
                wait_for(folder / "open")
            elif worker.rank == 0 and len(steps) == 2:
                wait_for(folder / "held")
            step(batch)
            steps.append(worker.step)
            if worker.rank == 0 and len(steps) == 12:
                (folder / "open").touch()
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        return {
            "steps": steps,
            "at": worker.step,
            "weights": worker.gather(weights.tolist()),
            "seen": float(model.seen),
        }

    return run


def test_without_a_bound_a_slow_replica_holds_up_nobody_and_each_sample_is_used_once(
    world: World, tmp_path: Path
) -> None:
    results = world(gated(tmp_path), 2, asynchronous(2), **THREADS)
    assert sorted(results[0]["steps"] + results[1]["steps"]) == list(range(1, 21))
    assert results[1]["steps"][0] <= 4 and len(results[0]["steps"]) >= 12
    assert all(result["at"] == 20 for result in results)
    assert results[0]["weights"] == results[1]["weights"] and results[0]["weights"][0] == results[0]["weights"][1]
    assert results[0]["seen"] == results[1]["seen"]
    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged
    told = steps_of(world, 2)
    assert sorted(event["step"] for event in told) == list(range(1, 21)) and all(event["alone"] for event in told)
    assert max(event["metrics"]["behind"] for event in told) >= 10  # the update that was held back


def test_what_a_slow_replica_holds_up_is_saved_when_it_is_done(world: World, tmp_path: Path) -> None:
    """A checkpoint waits for all batches before it: resumed, each sample is used once, whatever the order was."""
    world(gated(tmp_path), 2, asynchronous(2, batch=RESUME), max_steps=16, **THREADS)
    after = world(train, 3, Plan(layout=Layout(replicas=3), batch=RESUME, compute=EXACT), max_steps=18, **THREADS)
    assert [*after[0]] == [17, 18]
    last = world(train, 2, asynchronous(2, batch=RESUME), **THREADS)
    assert sorted([*last[0], *last[1]]) == list(range(19, 25))
    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged


def small() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, torch.randint(3, (60,), generator=generator))


RATE, MOMENTUM = 0.2, 0.9  # with a momentum the order of updates counts


def lagging(folder: Path, ahead: int) -> Callable[[Any], list[float]]:
    """Worker 1 stands still in its first batch until the others have taken so many steps, and they until it has it."""

    def run(worker: Any) -> list[float]:
        model = worker.prepare(small())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM))
        step = worker.stepper(model, optim, F.cross_entropy)
        for number, batch in enumerate(worker.batches(samples(), epochs=3)):  # 24 steps
            if number == 0 and worker.rank == 1:
                (folder / "held").touch()
                wait_for(folder / "ahead")
            elif number == 0:
                wait_for(folder / "held")
            step(batch)
            (folder / f"taken_{worker.step}").touch()
            if len([*folder.glob("taken_*")]) >= ahead:
                (folder / "ahead").touch()
        return weights_of(model)

    return run


def noting_what_it_serves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server write down, in its order, when it tells a worker weights, and when it takes an update."""
    served: Any = AsyncServer

    def noting(what: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(server: Any, caller: bytes, about: Any, **more: Any) -> None:
            method(server, caller, about, **more)
            header = getattr(about, "header", about)
            with path.open("a") as file:
                file.write(json.dumps([what, header["worker"], header.get("number")]) + "\n")

        return call

    monkeypatch.setattr(served, "_send_weights", noting("weights", served._send_weights))
    monkeypatch.setattr(served, "_update", noting("update", served._update))


def step_lines(world: World, workers: int) -> dict[int, dict[str, Any]]:
    """What the workers' ledgers say of the steps, by the number of each."""
    paths = [world.worker_dir(rank) / "ledger.jsonl" for rank in range(workers)]
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines if "step" in line}


def positions_in_order(world: World) -> dict[str, Any]:
    """How the ledger says that the samples are ordered."""
    lines = map(json.loads, (world.worker_dir(0) / "ledger.jsonl").read_text().splitlines())
    [opened] = [line for line in lines if "seed" in line]
    return {"seed": opened["seed"], "num_samples": opened["samples"], "shuffle": opened["shuffle"]}


def delayed_sgd(served: list[list[Any]], samples_of: Callable[[int], list[int]]) -> list[float]:
    """SGD in one process, in a recorded order: each gradient is taken at the weights that its worker was last told."""
    model, (inputs, targets) = small(), samples().tensors
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    velocity, seen = torch.zeros_like(weights), dict[int, Tensor]()
    for what, worker, number in served:
        if what == "weights":
            seen[worker] = weights
            continue
        torch.nn.utils.vector_to_parameters(seen[worker], model.parameters())
        chosen = samples_of(number)
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs[chosen]), targets[chosen]), [*model.parameters()])
        velocity = MOMENTUM * velocity + torch.nn.utils.parameters_to_vector(gradients)
        weights = weights - RATE * velocity
    return weights.tolist()


@pytest.mark.parametrize(("staleness", "ahead"), [(2, 2), (None, 9)])
def test_a_run_is_delayed_sgd_in_its_recorded_order_and_its_bound_binds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int | None, ahead: int
) -> None:
    noting_what_it_serves(tmp_path / "served", monkeypatch)
    plan = asynchronous(3, staleness=staleness, servers=1, batch=Batch(size=8, micro=4))
    weights = world(lagging(tmp_path, ahead), 3, plan, **THREADS)
    served = [json.loads(line) for line in (tmp_path / "served").read_text().splitlines()]
    lines, order = step_lines(world, 3), positions_in_order(world)

    def samples_of(number: int) -> list[int]:
        line = lines[number + 1]
        return sample_indices(epoch=line["epoch"], positions=np.arange(*line["whole"]), **order).tolist()

    replayed = delayed_sgd(served, samples_of)
    assert weights == [pytest.approx(replayed, rel=1e-9, abs=1e-12)] * 3
    versions, lags, taken = dict[int, int](), dict[int, int](), 0  # by worker; by step: how far it truly was behind
    for what, worker, number in served:
        if what == "weights":
            versions[worker] = taken
        else:
            lags[number + 1] = taken - versions[worker]
            taken += 1
    assert sorted(lags) == sorted(lines) == list(range(1, 24 + 1))
    assert all(0 <= lag <= lines[step]["behind"] for step, lag in lags.items())
    late = next(number + 1 for what, worker, number in served if (what, worker) == ("update", 1))
    behind = [event["metrics"]["behind"] for event in steps_of(world, 3)]
    assert max(behind) == max(line["behind"] for line in lines.values())
    # Worker 1's first update came when the others had taken all the steps that they were allowed, or that it awaited.
    if staleness is None:
        assert lags[late] >= ahead > 2
    else:
        assert lags[late] == max(behind) == staleness
    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged
    assert f"behind; the plan allows {'any number' if staleness is None else staleness}" in judged.notes[0]
    edited = next(path for path in world.run_dir.glob("**/ledger.jsonl") if '"behind": ' in path.read_text())
    edited.write_text(re.sub(r'"behind": \d+', '"behind": 3', edited.read_text(), count=1))
    assert audit(world.run_dir).is_clean == (staleness is None)


def gathers_objects(worker: Any) -> None:
    model = worker.prepare(Net())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)
        worker.evaluate(model, Text(8), next_word)  # each replica by itself
        worker.gather(1)


def scheduled(worker: Any) -> None:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    worker.prepare(torch.optim.lr_scheduler.StepLR(optim, 5))


def reading_ahead(worker: Any) -> None:
    model = worker.prepare(Net())
    worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    next(worker.batches(Text(), loaders=1))


def nested(worker: Any) -> None:
    model = worker.prepare(Net())
    worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for _ in worker.batches(Text()):
        next(worker.batches(Text(), name="other"))


class Noting(Net):
    """Has seen samples, by their first word, counts them, and holds the last words: a buffer that begins as None."""

    met: Tensor
    counted: Tensor
    constant: Tensor

    def __init__(self, *, fills: bool = False) -> None:
        super().__init__(0.0)
        self.fills = fills
        self.register_buffer("met", torch.zeros(WORDS, dtype=torch.bool))
        self.register_buffer("counted", torch.zeros((), dtype=torch.long))
        self.register_buffer("constant", torch.zeros(2))
        self.register_buffer("last", None)
        self.register_buffer("cached", None, persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.met[words[:, 0]] = True
            self.counted += len(words)
            self.constant.fill_(3.0)
            self.cached = words
        if self.fills:
            self.last = words[0]
        return super().forward(words)


def noting(worker: Any) -> dict[str, Any]:
    model = worker.prepare(Noting())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)
    return {name: worker.gather(getattr(model, name).tolist()) for name in ("met", "counted", "constant")}


@pytest.mark.parametrize("sync", [ParameterServer(staleness=None), ParameterServer(drop=1)])
def test_buffers_are_combined_by_their_rules_and_equal_on_all_replicas(world: World, sync: ParameterServer) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=Batch(size=10, micro=5), compute=EXACT, sync=sync)
    found = world(noting, 2, plan, **THREADS)[0]
    assert all(one == other for one, other in found.values())
    assert any(found["met"][0]) and found["constant"][0] == [3.0, 3.0]
    assert found["counted"][0] == (len(Text()) if not sync.drop else len(Text()) // 2)  # all of the samples that count


def queueing(worker: Any) -> None:
    class Queue(Net):
        """Keeps the newest words."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("newest", torch.zeros(64, dtype=torch.long))

        def forward(self, words: Tensor) -> Tensor:
            if self.training:
                self.newest = torch.cat([self.newest[len(words) :], words[:, 0] + 1])
            return super().forward(words)

    model = worker.prepare(Queue())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)


def filling(worker: Any) -> None:
    model = worker.prepare(Noting(fills=True))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)


def twice_after_a_skip(worker: Any) -> None:
    model, factors = worker.prepare(Net()), iter([math.inf, *[1.0] * 99])

    def forward(model: Any, micro: Any) -> Tensor:
        return next_word(model(micro[0]), micro[1]) * next(factors)

    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=forward)
    for batch in worker.batches(Text()):
        step(batch)
        step(batch)


def unprepared(worker: Any) -> None:
    worker.prepare(Net())
    next(worker.batches(Text()))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (gathers_objects, r"worker.gather\(\) was called in a loop over batches under ParameterServer"),
        (scheduled, r"got a StepLR .* count only its own batches. Set the rate from worker.step"),
        (reading_ahead, r"loaders=1 under ParameterServer"),
        (nested, r"the loop over 'other' began inside of the one over 'train'"),
        (twice, r"step\(batch\) was called twice for one batch: .* use staleness=0"),
        (twice_after_a_skip, r"step\(batch\) was called twice for one batch"),
        (unprepared, r"began before there was a stepper"),
        (queueing, r"buffer newest is a queue, and under ParameterServer\(.*\) replicas take steps by themselves"),
        (filling, r"buffer last, which began as None, was filled in a step"),
    ],
)
def test_what_cannot_be_says_so(world: World, program: Callable[[Any], None], says: str) -> None:
    with pytest.raises(WorkersFailed, match=says):
        world(program, 1, asynchronous(1), **THREADS)


def by_rate(worker: Any) -> list[float]:
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, next_word)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in worker.batches(Text()):
        for group in optim.param_groups:
            group["lr"] = 0.0 * worker.step
        step(batch)
    return [float((now - then).abs().max()) for now, then in zip(model.parameters(), before, strict=True)]


def test_a_rate_that_is_set_on_the_worker_counts_on_the_servers(world: World) -> None:
    assert set(world(by_rate, 1, asynchronous(1), **THREADS)[0]) == {0.0}


def retrying(worker: Any) -> int:
    model, has_failed = worker.prepare(Net(0.0)), False

    def forward(model: Any, micro: Any) -> Tensor:
        nonlocal has_failed
        if worker.step == 2 and not has_failed:
            has_failed = True
            raise ValueError("once")
        return next_word(model(micro[0]), micro[1])

    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=forward)
    for batch in worker.batches(Text()):
        try:
            step(batch)
        except ValueError:
            step(batch)
    return worker.step


def test_a_step_that_has_failed_may_be_tried_again(world: World) -> None:
    assert world(retrying, 1, asynchronous(1), **THREADS) == [4]
    assert sorted(event["step"] for event in steps_of(world, 1)) == [1, 2, 3, 4]
    assert audit(world.run_dir).verdict == "clean"


class Looking(Net):
    """Looks its words up by itself, so that the servers know of no table."""

    def forward(self, words: Tensor) -> Tensor:
        table = self.words.weight
        return F.embedding(words, table, sparse=True).matmul(table.detach().t())


def looking(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Looking(0.0))
    optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    return {"losses": [float(step(batch)) for batch in worker.batches(Text())], "norm": float(step.grad_norm)}


def test_sparse_gradients_of_a_module_of_the_users_own_train_like_one_process(world: World) -> None:
    results = world(looking, 1, asynchronous(1), **THREADS)
    assert_same(results, world.one_process(looking, plan_of(Layout()), **THREADS))
