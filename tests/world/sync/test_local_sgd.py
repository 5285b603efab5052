"""Local SGD and DiLoCo against a reference of a few lines, and against all-reduce where they are the same."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import quick
from forked import WorkersFailed, World
from layout_runs import RESUME, beside, without_dropout
from local_sgd_reference import Reference
from local_sgd_runs import BATCH, EXACT, OPTIMIZERS, STEPS, assert_same, model_of, plan_of, samples, train
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.plan import (
    AllReduce,
    Cast,
    Compute,
    Guard,
    Int8,
    Layout,
    LocalSGD,
    Nesterov,
    ParameterServer,
    Plan,
    PowerSGD,
    Wire,
)


def reference(
    sync: LocalSGD, replicas: int, *, optimizer: str, clip_norm: float | None = None
) -> tuple[Reference, list[list[float]]]:
    inputs, targets = samples().tensors
    made = Reference(
        model=model_of().double(),
        make=lambda model: OPTIMIZERS[optimizer](model.parameters()),
        inputs=inputs.double(),
        targets=targets,
        batch=BATCH.size,
        micro=BATCH.resolved_micro,
        replicas=replicas,
        every=sync.every,
        outer=sync.outer,
        clip_norm=clip_norm,
        fragments=sync.fragments,
        cut=3,  # as the sizes are
        overlap=sync.overlap,
        mixing=sync.mixing,
        keep_moves=sync.keep_moves,
    )
    return made, made.run(3 * STEPS)


@pytest.mark.parametrize(
    ("sync", "replicas", "options"),
    [
        quick.further(LocalSGD(every=4), 2, {"optimizer": "sgd"}),
        (LocalSGD(every=4), 3, {"optimizer": "momentum", "by_hand": True}),
        (LocalSGD(every=4, outer=Nesterov(lr=0.7, momentum=0.9)), 3, {"optimizer": "adamw", "clip_norm": 0.5}),
        quick.further(
            LocalSGD(every=2, outer=Nesterov(lr=1.0, momentum=0.0)),
            2,
            {"optimizer": "adamw", "clip_norm": 0.5, "by_hand": True},
        ),
        (LocalSGD(every=4, fragments=2, mixing=0.25, outer=Nesterov()), 2, {"optimizer": "momentum"}),
        (LocalSGD(every=3, fragments=2, overlap=1, outer=Nesterov(lr=0.5)), 3, {"optimizer": "adamw"}),
        quick.further(LocalSGD(every=5, overlap=2, mixing=0.5), 2, {"optimizer": "adamw"}),
        quick.further(LocalSGD(every=4, overlap=3, keep_moves=True), 2, {"optimizer": "adamw"}),
        (
            LocalSGD(every=3, fragments=2, overlap=2, keep_moves=True, outer=Nesterov(lr=0.5)),
            3,
            {"optimizer": "momentum"},
        ),
    ],
    ids=str,
)
def test_replicas_agree_as_the_reference_does(
    world: World, sync: LocalSGD, replicas: int, options: dict[str, Any]
) -> None:
    found = world(functools.partial(train, **options), replicas, plan_of(sync, replicas), save_at_end=False)
    oracle, losses = reference(sync, replicas, optimizer=options["optimizer"], clip_norm=options.get("clip_norm"))
    for replica, result in enumerate(found):
        assert result["losses"] == pytest.approx([each[replica] for each in losses], rel=1e-12, nan_ok=True)
        assert_same(result, oracle.model.state_dict())
        assert all(torch.equal(value, found[0]["state"][name]) for name, value in result["state"].items())


def test_of_every_step_and_plain_sgd_it_is_all_reduce(world: World) -> None:
    run = functools.partial(train, optimizer="sgd")
    found = world(run, 3, plan_of(LocalSGD(every=1), 3), save_at_end=False)
    oracle = world.one_process(run, plan_of(AllReduce(), 1))
    for result in found:
        assert_same(result, {k: v for k, v in oracle["state"].items() if not k.startswith("norm.num")})


@pytest.mark.parametrize("sync", [LocalSGD(every=4), LocalSGD(every=4, fragments=2, overlap=1, mixing=0.3)], ids=str)
def test_with_one_replica_it_is_all_reduce_to_the_last_bit(world: World, sync: LocalSGD) -> None:
    found = world(train, 1, plan_of(sync, 1), save_at_end=False)
    oracle = world.one_process(train, plan_of(AllReduce(), 1))
    assert found[0]["losses"] == oracle["losses"]
    assert all(torch.equal(value, oracle["state"][name]) for name, value in found[0]["state"].items())


def test_nothing_is_said_between_replicas_before_the_round_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("all_reduce", "begin_all_gather", "begin_all_to_all", "broadcast", "gather_objects", "barrier"):
        original = getattr(ElasticGroup, name)

        def counted(members: ElasticGroup, *args: Any, original: Any = original, **options: Any) -> Any:
            calls.append(str(options.get("what", original.__name__)))
            return original(members, *args, **options)

        monkeypatch.setattr(ElasticGroup, name, counted)

    def run(worker: Any) -> list[list[str]]:
        model = worker.prepare(model_of())
        optim = worker.prepare(torch.optim.AdamW(model.parameters()))
        step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
        said: list[list[str]] = []
        for batch in worker.batches(samples(), epochs=2):
            said.append(list(calls))  # from the step before on, and what was due after it
            calls.clear()
            step(batch)
        return [*said[1:], list(calls)]

    for said in world(run, 2, plan_of(LocalSGD(every=3), 2), save_at_end=False, save_every=None):
        assert [bool(calls) for calls in said] == [False, False, True] * 2, said


def test_the_wire_is_told_beside_the_gradients_that_did_not_travel(world: World) -> None:
    for found in world(train, 2, plan_of(LocalSGD(every=3), 2), save_at_end=False):
        ratio = found["sent"].num_sent / found["sent"].num_raw
        assert ratio == pytest.approx(1 / 3, rel=0.15), "and a few numbers that ride along"


LAYOUTS = {
    "shard": Layout(shard=2),
    "tensor": Layout(tensor=2),
    "stages": Layout(stages=2),
    "context": Layout(context=2),
}


STREAMS = LocalSGD(every=3, fragments=2, overlap=1, mixing=0.5, outer=Nesterov())


@pytest.mark.parametrize(
    ("axis", "sync"),
    [
        ("shard", LocalSGD(every=3, outer=Nesterov())),
        ("context", LocalSGD(every=3, outer=Nesterov())),
        ("stages", STREAMS),
        quick.further("tensor", LocalSGD(every=3, outer=Nesterov())),
        quick.further("stages", LocalSGD(every=3, outer=Nesterov())),
    ],
    ids=str,
)
def test_between_replicas_of_any_layout_it_is_the_same(world: World, tmp_path: Any, axis: str, sync: LocalSGD) -> None:
    parts = {"sync": sync, "batch": RESUME, "compute": EXACT}
    whole = beside(tmp_path)(without_dropout, 2, Plan(layout=Layout(replicas=2), **parts), save_at_end=False)
    plan = Plan(layout=dataclasses.replace(LAYOUTS[axis], replicas=2), **parts)
    found = world(without_dropout, 4, plan, save_at_end=False)
    for replica, oracle in enumerate(whole):
        for result in found[2 * replica : 2 * replica + 2]:
            for key in ("losses", "norms", "evaluated"):
                assert result[key] == pytest.approx(oracle[key], rel=1e-9, nan_ok=True), key
            assert axis == "stages" or result["seen"] == pytest.approx(oracle["seen"], rel=1e-9)


def test_a_checkpoint_goes_on_with_the_outer_momentum_in_any_layout_and_any_way_to_agree(
    world: World, tmp_path: Any
) -> None:
    sync = LocalSGD(every=3, outer=Nesterov())
    run = functools.partial(train, optimizer="sgd")
    whole = beside(tmp_path)(run, 2, plan_of(sync, 2), save_at_end=False)
    world(run, 2, plan_of(sync, 2), max_steps=3)
    for found in world(run, 2, plan_of(sync, 2), save_at_end=False):
        assert all(torch.equal(value, whole[0]["state"][name]) for name, value in found["state"].items())
        assert found["losses"] == whole[0]["losses"][3:] or found["losses"] == whole[1]["losses"][3:]
    kept = open_checkpoint(world.run_dir / "checkpoints" / "step_00000003")
    momentum = [name for name in kept.names if name.startswith("outer_optimizer.state.")]
    assert len(momentum) == 7, "one for each parameter"
    cut = plan_of(sync, 2, layout=Layout(replicas=2, shard=2))
    for found in world(run, 4, cut, save_at_end=False):
        assert len(found["losses"]) == 6
    for plan in (plan_of(AllReduce(), 2), plan_of(LocalSGD(every=2), 2)):
        assert len(world(run, 2, plan, save_at_end=False)[0]["losses"]) == 6
    assert "also holds outer_optimizer" in (world.worker_dir(0) / "events.jsonl").read_text()


def test_a_round_that_is_not_over_is_ended_by_a_save_and_evaluated_by_its_average(world: World) -> None:
    def run(worker: Any) -> tuple[float, float, bool]:
        model = worker.prepare(model_of())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        found = (0.0, 0.0, False)
        for batch in worker.batches(samples(), epochs=2):
            step(batch)
            if worker.step == 2:
                before = {name: value.clone() for name, value in model.state_dict().items()}
                first = worker.evaluate(model, samples(), F.cross_entropy)["loss"]
                assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
                own = worker.gather(float(model.head.weight.sum()))
                worker.save()
                equal = worker.gather(float(model.head.weight.sum()))
                assert own[0] != own[1] and equal[0] == equal[1]
                found = first, worker.evaluate(model, samples(), F.cross_entropy)["loss"], worker.step == 2
        return found

    for before, after, was_there in world(run, 2, plan_of(LocalSGD(every=5), 2), save_at_end=False):
        assert was_there
        assert before == pytest.approx(after, rel=1e-12), "without an outer optimizer all agree on the average"
    assert (world.run_dir / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.parametrize("wire", [Int8(), PowerSGD(rank=2), quick.further(Cast(dtype="bf16"))], ids=str)
def test_wires_shrink_what_replicas_agree_on_and_send_the_rest_later(world: World, wire: Wire) -> None:
    plan = plan_of(LocalSGD(every=3), 2, wire=wire, compute=Compute())
    found = world(train, 2, plan)
    assert found[0]["sent"].num_sent < 0.7 * found[0]["sent"].num_raw / 3
    assert all(torch.equal(value, found[1]["state"][name]) for name, value in found[0]["state"].items())
    raw = world.one_process(train, plan_of(LocalSGD(every=3), 1, compute=Compute()))
    assert found[0]["losses"][-2] == pytest.approx(raw["losses"][-2], abs=0.3)
    kept = open_checkpoint(world.run_dir / "checkpoints" / "step_00000009").names
    assert wire.feedback == any(name.startswith("wire:agreed:own:1:model.head") for name in kept)


@pytest.mark.parametrize("sync", [LocalSGD(every=2), ParameterServer(staleness=1), ParameterServer(drop=1)], ids=str)
def test_parity_is_refused_where_replicas_are_others_than_one_process_by_intention(
    world: World, tmp_path: Any, sync: Any
) -> None:
    with pytest.raises(WorkersFailed, match="paceline parity compares each step with that of one process"):
        world(train, 2, plan_of(sync, 2), capture_dir=str(tmp_path / "captured"))


def test_fragments_land_before_a_save_and_go_on_with_their_momentum(world: World, tmp_path: Any) -> None:
    run = functools.partial(train, optimizer="sgd")
    whole = beside(tmp_path)(run, 2, plan_of(STREAMS, 2), save_every=4)
    world(run, 2, plan_of(STREAMS, 2), save_every=4, max_steps=4)
    kept = open_checkpoint(world.run_dir / "checkpoints" / "step_00000004").names
    assert {name.partition(".")[0] for name in kept if name.startswith("outer")} == {
        "outer_optimizer_1_of_2",
        "outer_optimizer_2_of_2",
    }
    for found, other in zip(world(run, 2, plan_of(STREAMS, 2), save_every=4), whole, strict=True):
        assert found["losses"] == other["losses"][4:]
        assert all(torch.equal(value, other["state"][name]) for name, value in found["state"].items())


def test_a_save_that_is_due_in_a_round_waits_for_its_end(world: World) -> None:
    plan = plan_of(LocalSGD(every=3), 2, guard=Guard(check_every=2))  # weights are compared where they are equal
    world(train, 2, plan, save_every=2, save_at_end=False, keep=9)
    kept = sorted(path.name for path in (world.run_dir / "checkpoints").iterdir())
    assert kept == ["step_00000003", "step_00000006", "step_00000009"]
