"""Backup workers: the slowest are left out of a step, which is one on exactly the samples of the others."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forked
from forked import WorkersFailed, World
from layout_runs import BATCH, EXACT, RESUME, Net, Text, lines_of, next_word, train, twice, used_in
from paceline.monitor.audit.audit import audit
from paceline.plan import Batch, Cast, Compute, Guard, Layout, ParameterServer, Plan
from paceline.schedule.sample_order import sample_indices
from paused_workers import live_noticing, wait_for

THREADS = {"threads": 1}
CLIP = 0.5
PREEMPTED = 75


def backed(replicas: int, *, drop: int = 1, servers: int = 2, batch: Batch = BATCH) -> Plan:
    sync = ParameterServer(servers=servers, drop=drop)
    return Plan(layout=Layout(replicas=replicas), batch=batch, compute=EXACT, sync=sync)


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def gated(
    folder: Path, *, slow: int, steps: int, epochs: int = 3, loss: Callable[..., Any] = next_word
) -> Callable[[Any], dict[str, Any]]:
    """Worker `slow` stands still in its first batch until so many steps are over."""

    def run(worker: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = worker.prepare(Net(0.0))
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, loss, clip_norm=CLIP)
        losses: dict[int, float] = {}
        norms: dict[int, float] = {}
        for batch in worker.batches(Text(), epochs=epochs):  # 4 steps each
            if worker.rank == slow and not losses:
                (folder / "held").touch()
                wait_for(folder / "open")
            elif not losses:
                wait_for(folder / "held")
            value = float(step(batch))
            losses[worker.step], norms[worker.step] = value, float(step.grad_norm)
            if worker.rank != slow and worker.step >= steps:
                (folder / "open").touch()
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        return {
            "losses": losses,
            "norms": norms,
            "at": worker.step,
            "weights": worker.gather(weights.tolist()),
            "seen": float(model.seen),
        }

    return run


def one_process(used: dict[int, tuple[int, list[int]]]) -> dict[str, Any]:
    """Steps on exactly these samples, by plain torch."""
    torch.manual_seed(3)
    model, text = Net(0.0).double(), Text()
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    for number, (epoch, places) in sorted(used.items()):
        order = sample_indices(seed=0, epoch=epoch, num_samples=50, positions=np.array(places), shuffle=True)
        words, target = (torch.stack(some) for some in zip(*(text[int(one)] for one in order), strict=True))
        optim.zero_grad()
        loss = next_word(model(words), target)
        loss.backward()
        norms[number] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optim.step()
        losses[number] = float(loss.detach())
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return {"losses": losses, "norms": norms, "weights": weights.tolist(), "seen": float(model.seen)}


@pytest.mark.parametrize(("replicas", "drop", "servers", "loss"), [(3, 1, 2, next_word), (4, 2, 1, summed)])
def test_steps_are_those_of_one_process_on_the_samples_that_came_in_time_and_the_slow_one_holds_up_nobody(
    world: World, tmp_path: Path, replicas: int, drop: int, servers: int, loss: Callable[..., Any]
) -> None:
    program = gated(tmp_path, slow=replicas - 1, steps=6, loss=loss)
    results = world(program, replicas, backed(replicas, drop=drop, servers=servers), **THREADS)
    used = used_in(world, replicas)
    assert sorted(used) == list(range(1, 13))
    oracle = one_process(used)
    for result in results:
        assert result["at"] == 12
        assert result["losses"] == pytest.approx({step: oracle["losses"][step] for step in result["losses"]}, rel=1e-9)
        assert result["norms"] == pytest.approx({step: oracle["norms"][step] for step in result["norms"]}, rel=1e-9)
        assert result["seen"] == pytest.approx(oracle["seen"], rel=1e-6)  # of single precision
        for weights in result["weights"]:
            assert weights == results[0]["weights"][0]
    assert results[0]["weights"][0] == pytest.approx(oracle["weights"], rel=1e-7, abs=1e-9)
    first, second, *_ = [*results[-1]["losses"], 13]
    assert first == 1 and second > 6  # it was late for the first, and missed those that others took meanwhile

    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged
    num_used = sum(len(places) for _, places in used.values())
    assert sum(epoch.num_dropped for epoch in judged.epochs) == 150 - num_used > 0
    told = [event for event in lines_of(world, replicas, "events.jsonl") if event["event"] == "StepDone"]
    assert all(not event["alone"] for event in told)
    assert {event["step"]: event["num_samples"] - event["num_dropped"] for event in told} == {
        step: len(places) for step, (_, places) in used.items()
    }
    late = [event for event in told if event["late"]]
    assert (1, replicas - 1) in [(event["step"], event["worker"]) for event in late]


def test_a_replica_that_is_alone_in_time_takes_steps_by_itself_with_a_rounded_wire_too(
    world: World, tmp_path: Path
) -> None:
    rounded = {"compute": Compute(precision="fp32"), "wire": Cast(dtype="bf16", feedback=False)}
    plan = dataclasses.replace(backed(2), **rounded)
    results = world(gated(tmp_path, slow=1, steps=4), 2, plan, **THREADS)
    oracle = one_process(used_in(world, 2))
    for step in range(1, 5):  # taken by it alone
        assert results[0]["losses"][step] == pytest.approx(oracle["losses"][step], rel=2e-2)


def test_a_checkpoint_comes_between_two_steps_and_any_layout_goes_on_from_it(world: World, tmp_path: Path) -> None:
    world(gated(tmp_path, slow=2, steps=3, epochs=6), 3, backed(3, batch=RESUME), max_steps=9, save_every=4, **THREADS)
    assert sorted(path.name for path in (world.run_dir / "checkpoints").glob("step_*"))[-1] == "step_00000009"
    after = world(train, 2, Plan(layout=Layout(replicas=2), batch=RESUME, compute=EXACT), max_steps=11, **THREADS)
    assert [*after[0]] == [10, 11]
    last = world(train, 3, backed(3, batch=RESUME), max_steps=14, **THREADS)
    assert {step for losses in last for step in losses} == {12, 13, 14}
    assert audit(world.run_dir).is_clean


def asked_to_leave(folder: Path, *, asked: int) -> Callable[[Any], int]:
    """Worker 2 stands still in its first batch until worker 0 has done three; then one of them gets SIGTERM."""

    def run(worker: Any) -> int:
        torch.manual_seed(3)
        model = worker.prepare(Net(0.0))
        step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02)), next_word)
        for number, batch in enumerate(worker.batches(Text(), epochs=500)):
            if number == 0 and worker.rank == 2:
                (folder / "held").touch()
                wait_for(folder / "open")
                if asked == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            elif number == 0:
                wait_for(folder / "held")
            step(batch)
            if number == 2 and worker.rank == 0:
                if asked == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                (folder / "open").touch()
        return worker.step

    return run


@pytest.mark.parametrize("asked", [0, 2])
def test_where_one_is_asked_to_leave_the_late_one_comes_too_and_all_save_and_leave(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    monkeypatch.setattr(forked, "run_worker", live_noticing)
    plan = backed(3, batch=RESUME, servers=1)
    assert world(asked_to_leave(tmp_path, asked=asked), 3, plan, **THREADS) == [PREEMPTED] * 3
    stands = max(used_in(world, 3))
    assert [path.name for path in (world.run_dir / "checkpoints").glob("step_*")] == [f"step_{stands:08}"]
    assert audit(world.run_dir).is_clean


def spiked(folder: Path) -> Callable[[Any], dict[int, float]]:
    """The loss of step 10 is far too high. Worker 2 stands still until then, so that both others take every step."""

    def run(worker: Any) -> dict[int, float]:
        model = worker.prepare(Net(0.0))

        def forward(model: Any, micro: Any) -> Any:
            words, target = micro
            return next_word(model(words), target) * (1e3 if worker.step == 9 else 1.0)

        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
        step = worker.stepper(model, optim, forward=forward)
        losses: dict[int, float] = {}
        for batch in worker.batches(Text(), epochs=3):
            if worker.rank == 2 and not losses:
                (folder / "held").touch()
                wait_for(folder / "open")
            elif not losses:
                wait_for(folder / "held")
            loss = float(step(batch))
            losses[worker.step] = loss
            if worker.rank == 0 and worker.step > 10:
                (folder / "open").touch()
        return losses

    return run


def test_what_the_closer_judges_to_be_a_spike_is_left_out_by_all(world: World, tmp_path: Path) -> None:
    plan = dataclasses.replace(backed(3, servers=1), guard=Guard(on_spike="skip", window=8))
    results = world(spiked(tmp_path), 3, plan, **THREADS)
    told = [event for event in lines_of(world, 3, "events.jsonl") if event["event"] == "StepDone"]
    skipped = [(event["step"], event["worker"]) for event in told if event["skipped"]]
    assert sorted(skipped) == [(10, 0), (10, 1)]
    assert results[0][10] == results[1][10] > 1e3
    assert {line["step"] for line in lines_of(world, 3, "ledger.jsonl") if line.get("skipped")} == {10}
    assert results[0][11] < 2 * results[0][9]  # the weights have not been changed by it


def test_a_second_step_on_one_batch_is_refused(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"step\(batch\) was called twice for one batch: .* use drop=0"):
        world(twice, 2, backed(2, servers=1), **THREADS)


def passing_over(worker: Any) -> int:
    """All leave out the third step, and the last one."""
    model = worker.prepare(Net(0.0))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), next_word)
    for batch in worker.batches(Text(), epochs=2):  # 8 steps
        if batch.step in (3, 8):
            continue
        step(batch)
    return worker.step


def test_a_step_that_all_pass_over_is_noted_once_and_told_of_as_skipped(world: World) -> None:
    assert world(passing_over, 2, backed(2, servers=1), **THREADS) == [8, 8]
    lines = [line for line in lines_of(world, 2, "ledger.jsonl") if line.get("skipped")]
    assert sorted((line["step"], line["whole"]) for line in lines) == [(3, [32, 48]), (8, [48, 50])]
    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged
    events = lines_of(world, 2, "events.jsonl")
    assert sorted(event["step"] for event in events if event["event"] == "StepDone" and event["skipped"]) == [3, 8]
    assert "no prepared optimizer stepped" in str([event for event in events if event["event"] == "Warned"])
