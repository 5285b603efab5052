"""Synchronous parameter servers train like one process, and their checkpoints are anybody's."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forked
from forked import LIMIT_S, WorkersFailed, World
from layout_runs import BATCH, EXACT, RESUME, Net, Text, assert_same, beside, next_word, plan_of, train
from paceline.plan import Batch, Cast, Layout, ParameterServer, Plan
from paceline.worker.session import run_worker

SERVED = ParameterServer(servers=2, bucket_bytes=3000)


def served(replicas: int, batch: Batch = BATCH) -> Plan:
    return Plan(layout=Layout(replicas=replicas), batch=batch, compute=EXACT, sync=SERVED)


def by_two_optimizers(worker: Any) -> dict[str, Any]:
    """Several parameter groups, a schedule, and an optimizer that looks at matrices as a whole."""
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if not any(p is one for one in matrices)]
    muon = worker.prepare(torch.optim.Muon(matrices, lr=0.01))
    adam = worker.prepare(
        torch.optim.AdamW([{"params": others[:3], "lr": 0.01}, {"params": others[3:], "weight_decay": 0.1}], lr=0.02)
    )
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5))
    step = worker.stepper(model, [muon, adam], next_word, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
        schedule.step()
    found = worker.evaluate(model, Text(23), next_word)
    held = len(muon.state) + len(adam.state)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "seen": float(model.seen), "held": held}


def test_servers_train_like_one_process(world: World) -> None:
    results = world(by_two_optimizers, 3, served(3))
    oracle = world.one_process(by_two_optimizers, plan_of(Layout()))
    assert all(result["held"] == 0 for result in results), "the optimizers' state is on the servers alone"
    assert oracle.pop("held") > 0
    assert_same(results, oracle)


def test_checkpoints_of_servers_are_anybodys_and_anybodys_are_theirs(world: World, tmp_path: Path) -> None:
    oracle = beside(tmp_path)(train, 1, Plan(batch=RESUME, compute=EXACT))[0]
    first = world(train, 2, served(2, RESUME), max_steps=8)[0]
    second = world(train, 3, Plan(layout=Layout(replicas=3), batch=RESUME, compute=EXACT), max_steps=16)[0]
    third = world(train, 3, served(3, RESUME))[0]
    whole = {**first, **second, **third}
    assert [min(second), min(third)] == [9, 17]
    assert whole == pytest.approx(oracle, rel=1e-9)


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as some do that correct a mean by them."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.01)
                    p.sub_(mean, alpha=group["lr"] / (1 - 0.99 ** group["step"]))


def counted(worker: Any) -> dict[int, float]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(Counting(model.parameters(), lr=0.5))
    step, losses = worker.stepper(model, optim, next_word), dict[int, float]()
    for batch in worker.batches(Text(), epochs=6):
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def test_what_optimizers_count_in_their_groups_goes_on_from_checkpoints_of_servers(
    world: World, tmp_path: Path
) -> None:
    whole = Plan(batch=RESUME, compute=EXACT)
    oracle = beside(tmp_path)(counted, 1, whole, max_steps=16)[0]
    plans = [whole, served(1, RESUME), served(1, RESUME), whole]
    parts = [world(counted, 1, plan, max_steps=4 * number)[0] for number, plan in enumerate(plans, 1)]
    assert {key: loss for part in parts for key, loss in part.items()} == pytest.approx(oracle, rel=1e-9)


def rounded(worker: Any) -> dict[int, float]:
    return train(worker, drop=0.0)


def test_what_is_pushed_is_what_the_wire_says(world: World) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=BATCH, sync=SERVED, wire=Cast(dtype="bf16"))
    losses = world(rounded, 2, plan)[0]
    exact = world.one_process(rounded, Plan(layout=Layout(), batch=BATCH))
    assert losses == pytest.approx(exact, rel=0.02) and losses != pytest.approx(exact, rel=1e-7)
    lines = (world.worker_dir(0) / "events.jsonl").read_text().splitlines()
    done = [event for event in map(json.loads, lines) if event["event"] == "StepDone"]
    assert all(0 < 2 * event["num_wire_bytes"] == event["num_raw_bytes"] for event in done)


def plain(worker: Any) -> None:
    model = worker.prepare(Net())
    worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(Text()):
        for x, y in batch:
            worker.backward(next_word(model(x), y))


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("this optimizer cannot step")


def failing(worker: Any) -> None:
    model = worker.prepare(Net())
    step = worker.stepper(model, worker.prepare(Broken(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text()):
        step(batch)


def by_two_steppers(worker: Any) -> None:
    for number in range(2):
        model = worker.prepare(Net(), name=f"net{number}")
        worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)


def with_a_late_group(worker: Any) -> None:
    model = worker.prepare(Net())
    first, *others = model.parameters()
    optim = worker.prepare(torch.optim.SGD([first], lr=0.1))
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text()):
        step(batch)
        optim.add_param_group({"params": others})


def test_what_cannot_be_says_so(world: World) -> None:
    with pytest.raises(
        WorkersFailed, match=r"PlanError: a stepper over net1 under .*, beside one over net0: .*one step"
    ):
        world(by_two_steppers, 1, served(1))
    with pytest.raises(WorkersFailed, match=r"groups of SGD have changed since the first step"):
        world(with_a_late_group, 1, served(1))
    with pytest.raises(WorkersFailed, match=r"plain loop .* under ParameterServer"):
        world(plain, 1, served(1))
    with pytest.raises(WorkersFailed, match=r"(?s)parameter server 0 \(pid \d+ on testhost\) failed:.*cannot step"):
        world(failing, 2, served(2))


def without_its_server(worker: Any) -> None:
    model = worker.prepare(Net())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text(), epochs=3):
        step(batch)
        if worker.step == 3 and worker.rank == 1:
            os.kill(worker._servers._started[0], signal.SIGKILL)


def test_a_lost_server_ends_the_run_by_its_name(world: World) -> None:
    with pytest.raises(WorkersFailed) as caught:
        world(without_its_server, 2, served(2))
    told = caught.value.errors.values()  # a worker that only lost the other one says so
    assert any("parameter server 1 (pid" in error and "was lost" in error for error in told)


kept: list[Any] = []  # workers, after their end


def fails_in_the_end(worker: Any) -> None:
    kept.append(worker)
    train(worker)
    raise ArithmeticError("after the loop")


def outliving(function: Any, *args: Any, **more: Any) -> list[int]:
    """Be a worker that fails, in a process that lives on, as a notebook's does; returns those of its servers that are
    there still, or have not been reaped."""
    with pytest.raises(ArithmeticError, match="after the loop"):
        run_worker(function, *args, **more)
    left, deadline = list(kept[0]._servers._started), time.monotonic() + LIMIT_S / 2
    assert len(left) == 2
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if psutil.pid_exists(pid)]
        time.sleep(0.01)  # the end of a process that is reaped elsewhere tells nobody
    return left


def test_servers_end_with_a_worker_that_fails_though_its_process_lives_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "run_worker", outliving)
    assert world(fails_in_the_end, 1, served(1), max_steps=2) == [[]]


def names_of_servers(worker: Any) -> list[str]:
    train(worker)
    return [Path(f"/proc/{pid}/comm").read_text().strip() for pid in worker._servers._started]


def test_servers_are_processes_of_their_own_and_end_with_the_last_worker(world: World) -> None:
    names = world(names_of_servers, 2, served(2))
    assert names == [["paceline-server"], ["paceline-server"]]
