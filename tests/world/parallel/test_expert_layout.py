"""Layout(experts=n): experts of routed blocks on several workers, against one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import Prodigy
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import quick
from expert_models import WIDTH, AttendingMoeNet, ListedExperts, MoeNet
from forked import WorkersFailed, World
from layout_runs import EXACT, HELD_OUT, RESUME, ROWS, Text, assert_same, beside, next_word, plan_of, workers_of
from paceline.checkpoint.reader import open_checkpoint
from paceline.comm.flight_recorder import read_flight_record
from paceline.events import StepDone, decode
from paceline.plan import Batch, Layout, Plan
from tensor_models import hugging_face

KINDS = [
    Layout(experts=2),
    Layout(experts=4),
    Layout(replicas=2, experts=2),
    Layout(shard=2, experts=2),
    Layout(shard=2, zero=1, experts=2),
]
MIXTURES = [
    Layout(stages=2, experts=2, schedule="zero-bubble"),
    Layout(shard=2, stages=2, experts=2, schedule="zero-bubble"),
    Layout(tensor=2, sequence=True, experts=2),
    Layout(context=2, experts=2),
]
ROUTED: dict[str, dict[str, Any]] = {  # models of transformers
    "mixtral": {"output_router_logits": True},
    "qwen3_moe": {"output_router_logits": True},
    "deepseek_v3": {},
    "gpt_oss": {"output_router_logits": True},
}
THREE_AXES = [  # of a replica, which is eight workers
    Layout(shard=2, tensor=2, experts=2),
    Layout(shard=2, context=2, experts=2),
    Layout(context=2, tensor=2, experts=2),
    Layout(stages=2, tensor=2, experts=2),
    Layout(stages=2, context=2, experts=2),
]
PARTED = [Layout(shard=2, experts=2), Layout(stages=2, experts=2)]


def step_loss(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    words, target = micro
    return next_word(model(words), target) + 0.1 * model.auxiliary


def attending(worker: Any) -> tuple[AttendingMoeNet, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet())
    return model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))


def undropped(worker: Any) -> dict[str, Any]:
    """Without dropout, which stages draw otherwise, and without a loss of the blocks' own, of which these know none."""
    model, optim = attending(worker)
    return steps_of(worker, model, worker.stepper(model, optim, next_word, clip_norm=0.5))


def with_auxiliary(worker: Any) -> dict[str, Any]:
    """Means over the tokens of all who share sequences, and of all heads, are in the blocks' own loss."""
    model, optim = attending(worker)
    return steps_of(worker, model, worker.stepper(model, optim, forward=step_loss, clip_norm=0.5))


def steps_of(worker: Any, model: Any, step: Any) -> dict[str, Any]:
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS)):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    return {"losses": losses, "norms": norms, "evaluated": worker.evaluate(model, Text(HELD_OUT), next_word)["loss"]}


def prepared(worker: Any, **net: Any) -> tuple[MoeNet, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = worker.prepare(MoeNet(**net), buffers={"seen": "mean"})  # a trial would call the experts, too
    return model, worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))


def trained(worker: Any) -> dict[str, Any]:
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, forward=step_loss, clip_norm=0.5)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    found = worker.evaluate(model, Text(HELD_OUT), next_word)
    return {"losses": losses, "norms": norms, "evaluated": found["loss"], "seen": float(model.seen)}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return World(tmp_path_factory.mktemp("oracle")).one_process(trained, plan_of(Layout()))


@pytest.mark.parametrize("layout", KINDS, ids=str)
def test_it_trains_like_one_process(world: World, oracle: dict[str, Any], layout: Layout) -> None:
    assert_same(world(trained, workers_of(layout), plan_of(layout)), oracle)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """By whether the model is cut into stages."""
    alone = World(tmp_path_factory.mktemp("oracle"))
    runs = {True: undropped, False: with_auxiliary}
    return {is_staged: alone.one_process(run, plan_of(Layout())) for is_staged, run in runs.items()}


@pytest.mark.parametrize("layout", MIXTURES, ids=str)
def test_mixtures_train_like_one_process(world: World, oracles: Any, layout: Layout) -> None:
    is_staged = layout.stages > 1
    results = world(undropped if is_staged else with_auxiliary, workers_of(layout), plan_of(layout))
    assert_same(results, oracles[is_staged])


@pytest.mark.parametrize("layout", quick.spread(THREE_AXES, step=3), ids=str)
def test_three_axes_at_once_train_like_one_process(world: World, oracles: Any, layout: Layout) -> None:
    is_staged = layout.stages > 1
    run = undropped if is_staged else with_auxiliary
    for found in world(run, workers_of(layout), plan_of(layout), max_steps=2, save_at_end=False):
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(oracles[is_staged][what][:2], rel=1e-9), what


def by_plain_loop(worker: Any) -> dict[str, Any]:
    """Experts that nobody asks for are of one worker alone: the others have their gradients to sum all the same."""
    model, optim = prepared(worker, favours=1, drop=0.0)
    norms = []
    for batch in worker.batches(Text(ROWS)):
        for micro in batch:
            worker.backward(step_loss(model, micro))
        norms.append(float(worker.clip_gradients(0.5)))
        optim.step()
    return {"norms": norms, "evaluated": worker.evaluate(model, Text(HELD_OUT), next_word)["loss"]}


def test_a_plain_loop_with_idle_experts_and_recomputed_blocks(tmp_path: Path) -> None:
    oracle = beside(tmp_path).one_process(by_plain_loop, plan_of(Layout()))
    for number, recompute in enumerate(("none", "blocks", "selective")):
        (tmp_path / str(number)).mkdir()
        layout = Layout(shard=2, experts=2) if recompute == "blocks" else Layout(experts=2)
        place = World(tmp_path / str(number))
        assert_same(place(by_plain_loop, workers_of(layout), plan_of(layout, recompute=recompute)), oracle)


def steps(worker: Any) -> dict[int, float]:
    model, optim = attending(worker)
    step = worker.stepper(model, optim, next_word)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=2):
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def test_a_checkpoint_goes_on_under_any_other_layout(world: World, tmp_path: Path) -> None:
    whole = beside(tmp_path).one_process(steps, Plan(batch=RESUME, compute=EXACT))
    first = 1
    for layout, last in [
        (Layout(experts=2), 2),
        (Layout(), 3),
        (Layout(shard=2, experts=2), 4),
        (Layout(tensor=2, experts=2), 5),
        (Layout(stages=2, experts=2), 6),
        (Layout(replicas=2, experts=2), 7),
        (Layout(replicas=2), 8),
    ]:
        plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
        for result in world(steps, workers_of(layout), plan, max_steps=last):
            assert result == pytest.approx({step: whole[step] for step in range(first, last + 1)}, rel=1e-9), layout
        first = last + 1


def many_steps(worker: Any) -> dict[int, float]:
    model, optim = prepared(worker, drop=0.0, kinds=(ListedExperts,))
    step = worker.stepper(model, optim, forward=step_loss)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=4):  # of 13 steps
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def test_twenty_losses_after_experts_were_put_together_and_spread_are_those_of_one_process(
    world: World, tmp_path: Path
) -> None:
    batch = Batch(size=4, micro=2)
    whole = beside(tmp_path).one_process(many_steps, Plan(batch=batch, compute=EXACT), max_steps=42)
    first = 1
    for layout, last in [(Layout(experts=2), 2), (Layout(), 22), (Layout(experts=2), 42)]:
        plan = Plan(layout=layout, batch=batch, compute=EXACT)
        for found in world(many_steps, workers_of(layout), plan, max_steps=last):
            assert found == pytest.approx({step: whole[step] for step in range(first, last + 1)}, rel=1e-9), layout
        first = last + 1


@pytest.mark.parametrize("layout", PARTED, ids=str)
def test_a_checkpoint_of_a_mixture_holds_each_number_once(world: World, tmp_path: Path, layout: Layout) -> None:
    one = beside(tmp_path)
    world(steps, workers_of(layout), Plan(layout=layout, batch=RESUME, compute=EXACT), max_steps=2)
    one(steps, 1, Plan(batch=RESUME, compute=EXACT), max_steps=2)
    (path,), (other,) = ((each.run_dir / "checkpoints").iterdir() for each in (world, one))
    found, expected = open_checkpoint(path).load(), open_checkpoint(other).load()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    entries: dict[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    held = {name: sum(math.prod(chunk.sizes) for chunk in one.chunks) for name, one in entries.items()}
    assert {name: held[name] for name in expected} == {name: value.numel() for name, value in expected.items()}
    assert len(list(path.glob("*.distcp"))) == workers_of(layout), "all write"


def test_an_optimizer_that_looks_at_all_parameters_together_is_refused(world: World) -> None:
    def prepared_with_prodigy(worker: Any) -> None:
        worker.prepare(Prodigy(worker.prepare(MoeNet(kinds=(ListedExperts,))).parameters()))

    with pytest.raises(WorkersFailed, match=r"Prodigy.*under Layout\(experts=2\) each worker has only its own experts"):
        world(prepared_with_prodigy, 2, Plan(layout=Layout(experts=2), batch=RESUME))


def test_one_that_has_none_of_the_experts_is_not(world: World) -> None:
    def prepared_with_both(worker: Any) -> bool:
        model = worker.prepare(MoeNet(kinds=(ListedExperts,)))
        experts = {id(p) for one in model.modules() if isinstance(one, ListedExperts) for p in one.parameters()}
        dense = [p for p in model.parameters() if id(p) not in experts]
        worker.prepare(torch.optim.AdamW(p for p in model.parameters() if id(p) in experts))
        return worker.prepare(Prodigy(dense)) is not None

    assert world(prepared_with_both, 2, Plan(layout=Layout(experts=2), batch=RESUME)) == [True, True]


def loss_of(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0], use_cache=False).loss


def test_models_of_transformers_work_as_they_are(world: World, tmp_path: Path) -> None:
    def run(worker: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for kind, settings in ROUTED.items():
            torch.manual_seed(3)
            model = worker.prepare(hugging_face(kind, **settings))
            optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
            step = worker.stepper(model, optim, forward=loss_of)
            found[kind] = [float(step(batch)) for batch in worker.batches(Text(ROWS))]
        return found

    for kind in ROUTED:
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")  # once, for all workers
    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(run, Plan(batch=batch, compute=EXACT))
    for found in world(run, 2, Plan(layout=Layout(experts=2), batch=batch, compute=EXACT)):
        for kind, losses in expected.items():  # the models compute their loss in single precision
            assert found[kind] == pytest.approx(losses, rel=1e-6), kind


def test_what_travels_is_counted_and_named_where_a_hang_would_be_told(world: World) -> None:
    """All tokens go to the second worker's expert."""

    def run(worker: Any) -> None:
        model, optim = prepared(worker, favours=3, drop=0.0)
        step = worker.stepper(model, optim, forward=step_loss)
        for batch in worker.batches(Text(24)):
            step(batch)

    world(run, 2, Plan(layout=Layout(experts=2), batch=Batch(size=12, micro=6), compute=EXACT))
    sent = []
    for rank in range(2):
        lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
        _, step = [event for line in lines if isinstance(event := decode(line).event, StepDone)]
        sent.append(step.num_bytes_sent)
        ring = read_flight_record(world.worker_dir(rank) / "doing")
        assert ring is not None
        (group,) = [one for one in ring.groups if one.name == "experts 0-1"]
        here = [call for call in ring.calls if call.group == group.id and call.kind == "all_to_all"]
        calls = [call for call in here if call.step == 2]  # in the first step it is tried what the model keeps
        assert {call.what for call in calls} == {"all_to_all of tokens and their experts"}
        assert len(calls) == 2 * (3 + 2)  # blocks; counts, there, back, and two in backward
    tokens, number = 6 * 8 * 2, 8  # in two blocks; bytes of a number
    there, back = tokens * (WIDTH * number + number + 4), tokens * WIDTH * number
    assert sent[0] - sent[1] == there + back - (back + tokens * (WIDTH * number + number))
