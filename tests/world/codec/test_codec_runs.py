"""Runs with codecs: the same bits after a stop, nothing forgotten on another number of replicas, bytes as told."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked import World
from layout_runs import Text, next_word
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.memory_checkpoint import MemoryCheckpoint
from paceline.comm.sharded_tensors import local_part
from paceline.events import StepDone, decode
from paceline.plan import AllReduce, Batch, Compute, Guard, Int8, Layout, OneBit, Plan, PowerSGD, Raw, Sparse, Wire
from paceline.worker.lifecycle import WorkerLifecycle
from paceline.worker.state.codec_state import GatheredCodecState
from paceline.worker.state.memory_checkpointing import write_state
from paceline.worker.state.state_registry import model_entries

BATCH = Batch(size=16, micro=4)
BUCKETS = AllReduce(bucket_bytes=2048)


class Bytes(nn.Module):
    """Predicts a word from the one before it."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(47, 16, sparse=sparse)
        self.hidden, self.head = nn.Linear(16, 32), nn.Linear(32, 47)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.words(words))))


def plan_of(wire: Wire, **parts: Any) -> Plan:
    return Plan(wire=wire, batch=BATCH, sync=BUCKETS, **parts)


def train(
    worker: Any,
    *,
    sparse: bool = False,
    clip_norm: float | None = None,
    before_step: Callable[[], None] = lambda: None,
    spike_after: int = -1,
) -> dict[str, Any]:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return next_word(output, target) * (100.0 if worker.step == spike_after else 1.0)

    torch.manual_seed(3)
    model = worker.prepare(Bytes(sparse=sparse))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    step = worker.stepper(model, optim, loss_of, clip_norm=clip_norm)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=3):
        before_step()
        loss = float(step(batch))
        losses[worker.step] = loss
    state = {name: local_part(value).clone() for name, value in model_entries(model)[0].items()}
    held = {about: gradients.memory().copied().own for about, gradients in worker._models.reducers.sums()}
    return {"losses": losses, "state": state, "held": held}


@pytest.mark.parametrize("wire", [Int8(), PowerSGD(rank=2)], ids=str)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(world: World, tmp_path: Any, wire: Wire) -> None:
    (tmp_path / "whole").mkdir()
    whole = World(tmp_path / "whole")(train, 2, plan_of(wire))
    world(train, 2, plan_of(wire), max_steps=5)
    after = world(train, 2, plan_of(wire))
    for one, other in zip(after, whole, strict=True):
        assert all(torch.equal(one["state"][name], value) for name, value in other["state"].items())
        assert one["losses"] == {step: loss for step, loss in other["losses"].items() if step in one["losses"]}
        assert all(torch.equal(one["held"]["model"][name], held) for name, held in other["held"]["model"].items())
    assert not torch.equal(*(result["held"]["model"]["model.head.weight"] for result in whole))  # each has its own


def test_so_it_does_where_each_worker_has_the_factors_of_its_part_of_a_layer(world: World, tmp_path: Any) -> None:
    def factors(worker: Any) -> tuple[dict[int, float], dict[str, Tensor]]:
        losses = train(worker)["losses"]
        memory = next(iter(worker._models.reducers.sums()))[1].memory()
        common = {f"{name} {side}": one.clone() for name, named in memory.common.items() for side, one in named.items()}
        return losses, common

    plan = plan_of(PowerSGD(rank=2), layout=Layout(replicas=2, tensor=2))
    (tmp_path / "whole").mkdir()
    whole = World(tmp_path / "whole")(factors, 4, plan)
    world(factors, 4, plan, max_steps=5)
    after = world(factors, 4, plan)
    for (losses, held), (all_losses, all_held) in zip(after, whole, strict=True):
        assert losses == {step: loss for step, loss in all_losses.items() if step > 5}
        assert held.keys() == all_held.keys() and all(torch.equal(held[name], one) for name, one in all_held.items())
    first, second = whole[0][1], whole[1][1]  # of one replica
    assert first.keys() == second.keys() and not all(torch.equal(first[name], one) for name, one in second.items())


def test_another_number_of_replicas_shares_out_what_was_held_back(world: World) -> None:
    def restored(worker: Any) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = worker.prepare(Bytes())
        step = worker.stepper(model, worker.prepare(torch.optim.AdamW(model.parameters())), next_word)
        for _ in worker.batches(Text(), epochs=3):
            break
        assert callable(step)
        return dict(next(iter(worker._models.reducers.sums()))[1].memory().own)

    before = world(train, 2, plan_of(OneBit()), max_steps=5)
    held = {name: before[0]["held"]["model"][name] + value for name, value in before[1]["held"]["model"].items()}
    assert len(held) == 5 and all(bool(value.any()) for value in held.values())
    for workers in (3, 1):
        found = world(restored, workers, plan_of(OneBit()), save_at_end=False)
        for name, value in held.items():
            torch.testing.assert_close(sum(one[name] for one in found), value)
            assert all(torch.equal(one[name], found[0][name]) for one in found)


def test_only_who_writes_keeps_what_all_have_still_to_send(world: World) -> None:
    def kept(worker: Any) -> set[int]:
        """Of how many tensors a save is, beside the state."""
        found, save = set[int](), worker._parts.saver.save

        def noting(*, gathered: GatheredCodecState, **about: Any) -> None:
            found.add(len(gathered.tensors))
            save(gathered=gathered, **about)

        worker._parts.saver.save = noting
        train(worker)
        return found

    assert world(kept, 2, plan_of(OneBit()), max_steps=2, save_every=1) == [{2 * 5}, {0}]


def test_a_run_without_a_memory_says_what_it_drops(world: World) -> None:
    world(train, 2, plan_of(OneBit()), max_steps=2)
    world(train, 1, plan_of(Raw()), max_steps=3)
    assert "Raw() drops them" in (world.worker_dir(0) / "events.jsonl").read_text()


def test_a_step_that_is_not_taken_leaves_what_is_held_back(world: World) -> None:
    def run(worker: Any, *, broken: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = worker.prepare(Bytes())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_of(output: Tensor, target: Tensor) -> Tensor:
            is_broken = broken and worker.step == 2 and worker.rank == 1
            return next_word(output, target) * (float("nan") if is_broken else 1.0)

        step = worker.stepper(model, optim, loss_of)
        kept: list[dict[str, Tensor]] = []
        for batch in worker.batches(Text(), epochs=1):
            step(batch)
            own = worker._models.reducers.sum_over([model]).memory().own
            kept.append({name: value.clone() for name, value in own.items()})
        assert all(torch.equal(kept[2][name], value) == broken for name, value in kept[1].items())
        return kept[1]

    undisturbed = world(functools.partial(run, broken=False), 2, plan_of(OneBit()), save_at_end=False)
    world(functools.partial(run, broken=True), 2, plan_of(OneBit()), save_at_end=False)
    assert undisturbed


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2), Layout(stages=2)], ids=str)
def test_what_is_held_back_is_stored_whole_under_every_layout(world: World, layout: Layout) -> None:
    plan = plan_of(Int8(), layout=dataclasses.replace(layout, replicas=2))
    world(train, 4, plan, max_steps=3)
    checkpoint = open_checkpoint(world.run_dir / "checkpoints" / "step_00000003")
    for replica in range(2):
        stored = checkpoint.load([f"wire:model:own:{replica}:model.head.weight"])
        assert [tensor.shape for tensor in stored.values()] == [(47, 32)]
        assert all(bool(tensor.any()) for tensor in stored.values())
    alone = world(train, 1, plan_of(Int8()), max_steps=4)
    assert sorted(alone[0]["losses"]) == [4]


@pytest.mark.parametrize("workers", [1, 3])
def test_sparse_gradients_train_as_dense_ones_do_in_one_process(world: World, workers: int) -> None:
    exact = Compute(precision="fp64")
    sparse = functools.partial(train, sparse=True, clip_norm=0.5)
    found = world(sparse, workers, plan_of(Sparse(), compute=exact), save_at_end=False)
    oracle = world.one_process(functools.partial(train, clip_norm=0.5), plan_of(Raw(), compute=exact))
    for result in found:
        assert result["losses"] == pytest.approx(oracle["losses"], rel=1e-9)
        for name, value in oracle["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=1e-9, atol=1e-12)


def test_what_went_over_the_wire_is_told_beside_what_it_would_have_been(world: World) -> None:
    world(train, 2, plan_of(OneBit()), max_steps=2, save_at_end=False)
    lines = (world.worker_dir(0) / "events.jsonl").read_text().splitlines()
    told = [record.event for record in map(decode, lines) if isinstance(record.event, StepDone)]
    assert len(told) == 2
    num_elements = sum(parameter.numel() for parameter in Bytes().parameters())
    for step in told:
        assert step.num_raw_bytes == 4 * num_elements
        assert step.num_wire_bytes == pytest.approx(step.num_raw_bytes / 30, rel=0.1)
        assert step.num_bytes_sent == step.num_wire_bytes


def first_life(worker: Any) -> tuple[dict[int, float], Any, Any]:
    """Losses, and what there was after three steps: for the same worker again, and for a newcomer."""
    kept: list[Any] = []

    def keep() -> None:
        if worker.step == 3:
            kept.extend(copy.deepcopy([worker._memory_checkpointer._state(), worker._consensus._holder.snapshot()]))

    found = train(worker, before_step=keep)["losses"]
    return {step: loss for step, loss in found.items() if step > 3}, *kept


def second_life(worker: Any, states: list[Any]) -> dict[int, float]:
    with began_with(worker, states[worker.rank]):
        return train(worker)["losses"]


@contextlib.contextmanager
def began_with(worker: Any, state: Any) -> Iterator[None]:
    """A worker that begins again with what was kept after step 3."""
    with contextlib.closing(MemoryCheckpoint.create("test")) as memory_checkpoint:
        slot = memory_checkpoint.next
        slot.commit(write_state(slot, state, step=3, is_for_all=False))
        WorkerLifecycle(worker._parts, worker._loop).resume(slot)
        yield


def test_memory_that_outlives_a_worker_has_its_own_and_a_newcomer_has_what_all_know(world: World) -> None:
    plan = plan_of(PowerSGD(rank=2))
    lives = world(first_life, 2, plan, save_at_end=False)
    for found in world(functools.partial(second_life, states=[one[1] for one in lives]), 2, plan, save_at_end=False):
        assert found == lives[0][0]
    for _, state, handed in lives:
        assert any(name.startswith("wire:model:own:") for name in state["tensors"])
        told = [name for name in handed["tensors"] if name.startswith("wire:")]
        assert told and all(name.startswith("wire:model:common:") for name in told)


def test_who_begins_again_with_another_replicas_snapshot_does_not_send_what_that_one_has_still_to_send(
    world: World,
) -> None:
    def found(worker: Any, *, state: Any) -> tuple[set[str], set[str]]:
        """The parameters of which something is to be sent, and of which all know something, when it begins."""
        memories: list[Any] = []

        def look() -> None:
            if worker.step == 3:
                memories.append(next(iter(worker._models.reducers.sums()))[1].memory().copied())

        with began_with(worker, state):
            train(worker, before_step=look)
        (memory,) = memories
        return {name for name, value in memory.own.items() if value.any()}, set(memory.common)

    plan = plan_of(PowerSGD(rank=2))
    (_, state, _), _ = world(first_life, 2, plan, save_at_end=False)
    own, other = world(functools.partial(found, state=state), 2, plan, save_at_end=False)
    assert own[0] and not other[0]
    assert own[1] == other[1] != set()


def test_a_rollback_drops_what_was_still_to_be_sent(world: World) -> None:
    def run(worker: Any) -> list[bool]:
        held: list[bool] = []

        def look() -> None:
            gradients = next(iter(worker._models.reducers.sums()), (None, None))[1]
            held.append(gradients is not None and bool(gradients.memory().own))

        train(worker, before_step=look, spike_after=10)
        return held

    guard = Guard(on_spike="rollback", window=8, snapshot_every=4)
    for held in world(run, 2, plan_of(Int8(), guard=guard), save_at_end=False):
        assert held == [step not in (0, 11) for step in range(12)]
