"""What a plain loop does around `optim.step`: closures, GradScaler, clipping by value; equal to one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forked import World
from layout_runs import EXACT, ROWS, Net, Text, beside, next_word
from paceline.events import StepDone, decode
from paceline.plan import Batch, Gossip, Layout, LocalSGD, ParameterServer, Plan

BATCH = Batch(size=16, micro=3)


def data() -> torch.utils.data.TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, (x @ torch.tensor([1.0, -2.0, 0.5, 3.0])).unsqueeze(1).tanh())


def small(worker: Any) -> nn.Module:
    torch.manual_seed(0)
    return worker.prepare(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))


def by_closure(worker: Any) -> dict[str, Any]:
    model = small(worker)
    optim = worker.prepare(torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe"))
    returned = []
    for batch in worker.batches(data(), epochs=2):

        def closure(batch: Any = batch) -> Tensor | None:
            optim.zero_grad()
            loss = None
            for x, y in batch:
                loss = F.mse_loss(model(x), y)
                worker.backward(loss)
            return loss

        returned.append(float(optim.step(closure)))
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        worker.stepper(model, optim, F.mse_loss)
    return {"returned": returned, "weights": [one.tolist() for one in model.parameters()]}


def without_pass(worker: Any) -> str:
    model = small(worker)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in worker.batches(data()):

        def closure() -> Tensor:
            loss = model(torch.ones(1, 4, dtype=torch.float64)).sum()
            loss.backward()
            return loss

        try:
            optim.step(closure)
        except RuntimeError as error:
            return str(error)
    return ""


def scaled(worker: Any) -> dict[str, Any]:
    model = small(worker)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    scales, moved = [], []
    for batch in worker.batches(data(), epochs=4):
        for x, y in batch:
            output = model(x).float().double()  # so gradients beyond float32 overflow
            worker.backward(scaler.scale(100 * F.mse_loss(output, y)))
        before = copy.deepcopy(model.state_dict())
        scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(before[key], value) for key, value in model.state_dict().items()))
        optim.zero_grad()
    return {"scales": scales, "moved": moved, "weights": [one.tolist() for one in model.parameters()]}


def around_steps(worker: Any) -> dict[str, Any]:
    return {"closure": by_closure(worker), "scaled": scaled(worker), "says": without_pass(worker)}


def test_closures_get_the_global_loss_and_a_scaler_skips_the_same_steps_everywhere(
    world: World, tmp_path: Path
) -> None:
    plan = Plan(batch=BATCH, compute=EXACT)
    (alone,) = beside(tmp_path)(around_steps, 1, plan, save_at_end=False)
    for found in world(around_steps, 2, plan, save_at_end=False):
        assert found["closure"]["returned"] == pytest.approx(alone["closure"]["returned"], rel=1e-6)
        assert found["scaled"]["scales"] == alone["scaled"]["scales"]
        assert found["scaled"]["moved"] == alone["scaled"]["moved"]
        for which in ("closure", "scaled"):
            for mine, others in zip(found[which]["weights"], alone[which]["weights"], strict=True):
                assert torch.allclose(torch.tensor(mine), torch.tensor(others), atol=1e-7)
        assert "made no complete pass over the batch" in found["says"]
    assert not alone["scaled"]["moved"][0] and any(alone["scaled"]["moved"])


def attending(worker: Any) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    returned = []
    for batch in worker.batches(Text(ROWS)):

        def closure(batch: Any = batch) -> Tensor | None:
            optim.zero_grad()
            loss = None
            for x, y in batch:
                loss = next_word(model(x), y)
                worker.backward(loss)
            return loss

        returned.append(float(optim.step(closure)))
    return returned


def test_closures_where_sequences_are_split(world: World, tmp_path: Path) -> None:
    (alone,) = beside(tmp_path)(attending, 1, Plan(batch=BATCH, compute=EXACT), save_at_end=False)
    plan = Plan(layout=Layout(context=2), batch=BATCH, compute=EXACT)
    for found in world(attending, 2, plan, save_at_end=False):
        assert found == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("sync", [LocalSGD(every=2), Gossip(average_every=2)], ids=str)
def test_closures_of_replicas_that_step_by_themselves_end_with_equal_weights(world: World, sync: Any) -> None:
    plan = Plan(layout=Layout(replicas=2), sync=sync, batch=BATCH, compute=EXACT)
    one, other = world(by_closure, 2, plan)
    assert one["weights"] == other["weights"]
    assert one["returned"][-1] < one["returned"][0]


class Turned(nn.Module):
    """A model with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(0.0)
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex128))

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words) * (self.phase.sum().abs() / 8)


def clipped(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    norms, losses = [], []
    for batch in worker.batches(Text(ROWS), epochs=2):
        for x, y in batch:
            worker.backward(next_word(model(x), y))
        if len(norms) % 2:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            norms.append(0.0)
        else:
            norms.append(float(worker.clip_gradients(max_value=0.01)))
        optim.step()
        optim.zero_grad()
    step = worker.stepper(model, optim, next_word, clip_value=0.01)
    for batch in worker.batches(Text(ROWS), epochs=1):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    return {"norms": norms, "losses": losses}


def turned(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Turned())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    step = worker.stepper(model, optim, next_word, clip_norm=0.1)
    losses, norms = [], []
    for batch in worker.batches(Text(ROWS), epochs=2):
        losses.append(float(step(batch)))
        norms.append(float(step.grad_norm))
    return {"norms": norms, "losses": losses}


def by_value_and_complex(worker: Any) -> dict[str, Any]:
    return {"clipped": clipped(worker), "turned": turned(worker)}


def test_clipping_by_value_and_of_complex_parameters_under_tensor(world: World, tmp_path: Path) -> None:
    plan = Plan(batch=BATCH, compute=EXACT)
    (alone,) = beside(tmp_path)(by_value_and_complex, 1, plan, save_at_end=False)
    split = Plan(batch=BATCH, compute=EXACT, layout=Layout(tensor=2))
    for found in world(by_value_and_complex, 2, split, save_at_end=False):
        for which in ("clipped", "turned"):
            for key, value in alone[which].items():
                assert found[which][key] == pytest.approx(value, rel=1e-9), (which, key)


def on_servers(worker: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    step = worker.stepper(model, optim, next_word, clip_value=0.01)
    return {"losses": [float(step(batch)) for batch in worker.batches(Text(ROWS), epochs=2)]}


def test_servers_clip_by_value(world: World, tmp_path: Path) -> None:
    plan = Plan(batch=BATCH, compute=EXACT)
    (alone,) = beside(tmp_path)(on_servers, 1, plan, save_at_end=False)
    served = Plan(batch=BATCH, compute=EXACT, sync=ParameterServer())
    for found in world(on_servers, 2, served, save_at_end=False):
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-9)


def overflows(worker: Any) -> dict[str, Any]:
    """A GradScaler whose first step overflows; in the end a stepper is given a scaled loss."""
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales, says = [], ""
    for number, batch in enumerate(worker.batches(Text(ROWS), epochs=2)):
        for x, y in batch:
            loss = next_word(model(x).float().double(), y)  # so gradients beyond float32 overflow
            worker.backward(scaler.scale(loss) if number else scaler.scale(loss) * 1e38)
        scaler.unscale_(optim)
        worker.clip_gradients(0.5)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        scales.append(scaler.get_scale())
    evaluated = worker.evaluate(model, Text(ROWS), next_word)["loss"]
    step = worker.stepper(model, optim, lambda output, y: scaler.scale(next_word(output, y)))
    for batch in worker.batches(Text(ROWS)):
        try:
            step(batch)
        except RuntimeError as error:
            says = str(error)
            break
    return {"scales": scales, "evaluated": evaluated, "says": says}


def reported(world: World) -> list[float]:
    records = [decode(line) for line in (world.worker_dir(0) / "events.jsonl").read_text().splitlines()]
    losses = [record.event.loss for record in records if isinstance(record.event, StepDone)]
    return [loss for loss in losses if loss is not None]


@pytest.mark.parametrize("layout", [Layout(shard=2, tensor=2), Layout(context=2)], ids=["shard_tensor", "context"])
def test_a_scaled_loss_is_reported_as_in_one_process_and_its_first_overflow_skipped(
    world: World, tmp_path: Path, layout: Layout
) -> None:
    one = beside(tmp_path)
    (alone,) = one(overflows, 1, Plan(batch=BATCH, compute=EXACT), save_at_end=False)
    split = Plan(batch=BATCH, compute=EXACT, layout=layout)
    for found in world(overflows, layout.workers_each, split, save_at_end=False):
        assert found["scales"] == alone["scales"] and alone["scales"][0] == 2.0**9
        assert found["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-6)
        assert "GradScaler.scale() multiplied the loss by 2048" in found["says"]
    losses = reported(world)
    assert losses == pytest.approx(reported(one), rel=1e-6)
    assert losses[0] > 1e38 and 0 < max(losses[1:]) < 20


class HalfScaler(torch.amp.GradScaler):
    """A user's own, which has a scale of its own."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) * 0.5


def by_own_scaler(worker: Any) -> str:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    scaler = HalfScaler("cpu", init_scale=2.0**10)
    for batch in worker.batches(Text(ROWS), epochs=1):
        for x, y in batch:
            worker.backward(scaler.scale(next_word(model(x), y)))
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # a class made after the first pass

    sharded = ShardedGradScaler("cpu")
    try:
        for batch in worker.batches(Text(ROWS), epochs=1):
            for x, y in batch:
                worker.backward(sharded.scale(next_word(model(x), y)))
    except RuntimeError as error:
        return str(error)
    return str(optim)


def test_a_derived_scaler_is_seen_too_and_that_of_fsdp_refused_by_name(world: World) -> None:
    plan = Plan(batch=BATCH, compute=EXACT, layout=Layout(shard=2))
    for said in world(by_own_scaler, 2, plan, save_at_end=False):
        assert said.startswith("ShardedGradScaler asks torch's default process group"), said
    assert 0 < max(reported(world)) < 20, "losses are told unscaled"
