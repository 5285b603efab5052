"""How loops of replicas that do not wait for each other end: left, interrupted, asked to leave, or over."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from async_runs import THREADS, asynchronous, steps_of, weights_of
from forked import World
from layout_runs import (
    BATCH,
    EXACT,
    RESUME,
    Net,
    Text,
    assert_same,
    next_word,
    plan_of,
    prepared,
)
from paceline.elastic.membership_messages import Finish
from paceline.monitor.audit.audit import audit
from paceline.plan import Layout, ParameterServer, Plan
from paceline.sync.parameter_server.async_updates import AsyncGradients
from paused_workers import live_noticing, wait_for

PREEMPTED = 75


class Told:
    """Orders of a head: all are to leave once the file is there."""

    has_acknowledged = False

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def finish(self) -> Finish | None:
        return Finish(exit_code=PREEMPTED, reason="asked to leave") if self._path.exists() else None

    def planned(self, generation: int) -> None:
        return None

    def is_over(self, generation: int) -> bool:
        return False

    def tell(self, op: str, **fields: Any) -> None:
        pass


def holding_up(
    folder: Path, *, epochs: int, when_held: Callable[[int], None], has_head: bool = False
) -> Callable[[Any], int]:
    """Worker 0 stands still in its first batch until worker 1 has done three; then both do `when_held(rank)`."""

    def run(worker: Any) -> int:
        if has_head:
            worker._consensus._coordinator = Told(folder / "told")
        torch.manual_seed(3)
        model = worker.prepare(Net(0.0))
        step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02)), next_word)
        for number, batch in enumerate(worker.batches(Text(), epochs=epochs)):  # 4 steps each
            if number == 0 and worker.rank == 0:
                (folder / "held").touch()
                wait_for(folder / "open")
                when_held(0)
            elif number == 0:
                wait_for(folder / "held")
            step(batch)
            if number == 2 and worker.rank == 1:
                when_held(1)
                (folder / "open").touch()
        return worker.step

    return run


@pytest.mark.parametrize("asked", [0, 1])
def test_where_one_is_asked_to_leave_all_finish_their_batches_save_and_leave(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    def ask(rank: int) -> None:
        if rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(forked, "run_worker", live_noticing)
    program = holding_up(tmp_path, epochs=50, when_held=ask)
    assert world(program, 2, asynchronous(2, batch=RESUME), **THREADS) == [PREEMPTED, PREEMPTED]
    stands = len(steps_of(world, 2))
    assert [path.name for path in (world.run_dir / "checkpoints").glob("step_*")] == [f"step_{stands:08}"]
    further = holding_up(tmp_path, epochs=50, when_held=lambda rank: None)
    assert world(further, 1, asynchronous(1, batch=RESUME), max_steps=stands + 2, **THREADS) == [stands + 2]
    assert [event["step"] for event in steps_of(world, 1)] == [stands + 1, stands + 2]
    assert audit(world.run_dir).verdict == "clean"


def test_a_head_that_ends_the_run_while_one_waits_for_a_save_is_heeded_by_all(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(rank: int) -> None:
        if rank == 0:
            (tmp_path / "told").touch()

    monkeypatch.setattr(forked, "run_worker", live_noticing)
    program = holding_up(tmp_path, epochs=2, when_held=tell, has_head=True)
    assert world(program, 2, asynchronous(2), save_every=4, **THREADS) == [PREEMPTED, PREEMPTED]
    assert [path.name for path in (world.run_dir / "checkpoints").glob("step_*")] == ["step_00000004"]


def test_a_head_that_ends_the_run_in_the_last_batch_comes_too_late(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(rank: int) -> None:
        if rank == 0:
            (tmp_path / "told").touch()

    monkeypatch.setattr(forked, "run_worker", live_noticing)
    program = holding_up(tmp_path, epochs=1, when_held=tell, has_head=True)
    assert world(program, 2, asynchronous(2), **THREADS) == [4, 4]


def left_early(worker: Any) -> dict[str, Any]:
    model, optim = prepared(worker, drop=0.0)
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text()):
        step(batch)
        if worker.step == 3:
            break
    left = weights_of(model), float(model.seen)
    return {"left": left[0], "seen": left[1], "evaluated": worker.evaluate(model, Text(23), next_word)["loss"]}


def test_who_leaves_a_loop_has_its_own_last_update(world: World) -> None:
    results = world(left_early, 1, asynchronous(1), **THREADS)
    assert_same(results, world.one_process(left_early, plan_of(Layout()), **THREADS))


def left_by_one(folder: Path) -> Callable[[Any], dict[str, Any]]:
    """After a loop that all end, worker 0 leaves the next one; worker 1 stands still in it until then."""

    def run(worker: Any) -> dict[str, Any]:
        model, optim = prepared(worker, drop=0.0)
        step = worker.stepper(model, optim, next_word)
        for batch in worker.batches(Text()):
            step(batch)
        for batch in worker.batches(Text(), epochs=2):
            if worker.rank == 1:
                wait_for(folder / "left")
            step(batch)
            if worker.rank == 0:
                break
        (folder / "left").touch()
        evaluated = worker.evaluate(model, Text(23), next_word)["loss"]
        weights = worker.gather(weights_of(model))
        refused: list[str] = []
        for ask in (worker.save, lambda: worker.batches(Text())):
            try:
                ask()
            except RuntimeError as error:
                refused.append(str(error).partition(" a loop over batches")[0])
        return {"weights": weights, "evaluated": evaluated, "refused": refused}

    return run


@pytest.mark.parametrize("sync", [ParameterServer(servers=2, staleness=None), ParameterServer(servers=2, drop=1)])
def test_where_one_leaves_a_loop_all_have_the_last_weights_afterwards_and_there_is_no_further_loop(
    world: World, tmp_path: Path, sync: ParameterServer
) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=BATCH, compute=EXACT, sync=sync)
    left, stayed = world(left_by_one(tmp_path), 2, plan, **THREADS)
    assert left["weights"] == stayed["weights"] and left["weights"][0] == left["weights"][1]
    assert left["evaluated"] == stayed["evaluated"]
    assert left["refused"] == [
        f"worker.{what}() was called after this replica had left" for what in ("save", "batches")
    ]
    assert stayed["refused"] == ["worker.batches() was called after another replica had left"]
    assert not [*world.run_dir.glob("checkpoints/step_*")]


def interrupted(folder: Path, *, by: str, is_caught_inside: bool) -> Callable[[Any], list[Any]]:
    """Worker 1 is interrupted in its second update, when one server has it ("_flats": what the next one is to get), or
    all have ("apply"); worker 0 stands still until then."""

    def run(worker: Any) -> list[Any]:
        patched: Any = AsyncGradients
        method, num_updates = getattr(patched, by), 0

        def breaking(gradients: AsyncGradients, given: Any) -> Any:
            nonlocal num_updates
            num_updates += by == "apply" or given == 0
            is_due = worker.rank == 1 and num_updates == 2
            answer = None if is_due and by == "_flats" else method(gradients, given)
            if is_due:
                (folder / "interrupted").touch()
                num_updates += 1
                raise KeyboardInterrupt
            return answer

        setattr(patched, by, breaking)
        model, optim = prepared(worker, drop=0.0)
        step = worker.stepper(model, optim, next_word)
        caught = (KeyboardInterrupt,) if is_caught_inside else ()
        with contextlib.suppress(KeyboardInterrupt):
            for batch in worker.batches(Text(), epochs=2):
                if worker.rank == 0:
                    wait_for(folder / "interrupted")
                with contextlib.suppress(*caught):
                    step(batch)
        worker.wait()
        return worker.gather(weights_of(model))

    return run


@pytest.mark.parametrize(("by", "is_caught_inside"), [("apply", False), ("apply", True), ("_flats", True)])
def test_a_batch_in_whose_step_one_is_interrupted_counts_once(
    world: World, tmp_path: Path, by: str, is_caught_inside: bool
) -> None:
    program = interrupted(tmp_path, by=by, is_caught_inside=is_caught_inside)
    results = world(program, 2, asynchronous(2), **THREADS)
    assert results[0] == results[1] and results[0][0] == results[0][1]
    judged = audit(world.run_dir)
    assert judged.verdict == "clean", judged
    ledgers = [path.read_text() for path in world.run_dir.glob("**/ledger.jsonl")]
    assert len(ledgers) == 2 and '"skipped": true' not in "".join(ledgers)


KEPT = list[Any]()


def kept_open(worker: Any) -> None:
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, next_word)
    KEPT.append(worker.batches(Text()))
    step(next(KEPT[0]))


def test_a_loop_that_is_still_open_at_the_end_was_left_and_is_not_saved(world: World) -> None:
    world(kept_open, 1, asynchronous(1), **THREADS)
    assert not [*world.run_dir.glob("checkpoints/step_*")]
