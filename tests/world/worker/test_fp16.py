"""fp16 with a loss scale: as a plain torch loop with a GradScaler, the same scale on all workers, under each plan."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lasting
import quick
from expert_models import AttendingMoeNet
from forked import WorkersFailed, World
from layout_runs import ROWS, Net, Text, beside, next_word, workers_of
from paceline.comm.sharded_tensors import local_part
from paceline.events import Note, StepDone, Warned, decode
from paceline.plan import (
    AllReduce,
    Batch,
    Cast,
    Compute,
    Gossip,
    Guard,
    Int8,
    Layout,
    LocalSGD,
    Nesterov,
    OneBit,
    ParameterServer,
    Plan,
    PowerSGD,
    TopK,
)

BATCH, SHUFFLED = Batch(size=16, micro=3, shuffle=False), Batch(size=16, micro=3)
PLANTED = 4  # a step whose loss is 1e30 times as large
WITHIN = 2.5e-3  # two and a half roundings


def fp16(**options: Any) -> Compute:
    return Compute(precision="fp16", **{"loss_scale_start": 2.0**12, "loss_scale_window": 3, **options})


def data() -> TensorDataset:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))


def events(world: World, rank: int = 0) -> list[Any]:
    return [decode(line).event for line in (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()]


def steps(world: World, rank: int = 0) -> list[StepDone]:
    return [event for event in events(world, rank) if isinstance(event, StepDone)]


def scales(world: World, rank: int = 0) -> list[tuple[float, bool]]:
    """Of each step the scale, and whether it was skipped."""
    return [(event.optimizer["loss_scale"], event.skipped) for event in steps(world, rank)]


def told(world: World, kind: Any, rank: int = 0) -> list[str]:
    return [event.text for event in events(world, rank) if isinstance(event, kind)]


# ------------------------------------------------------------------------------------------------ as a plain torch loop


def by_torch() -> dict[str, Any]:
    """The oracle, in which nothing is Paceline's."""
    model, found = small(), data()
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    losses, used, norms = [], [], []
    for number in range(6):
        x, y = found[number * 16 : (number + 1) * 16]
        used.append(scaler.get_scale())
        total = 0.0
        for inputs, targets in zip(x.split(3), y.split(3), strict=True):
            with torch.autocast("cpu", torch.float16):
                output = model(inputs)
            loss = F.cross_entropy(output.float(), targets) * (1e30 if number + 1 == PLANTED else 1.0)
            scaler.scale(loss * (len(inputs) / 16)).backward()
            total += float(loss.detach()) * len(inputs) / 16
        scaler.unscale_(optim)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        losses.append(total)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return {"losses": losses, "scales": used, "norms": norms, "weights": weights}


def planted(worker: Any, *, plain: bool = False) -> dict[str, Any]:
    model = worker.prepare(small())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target) * (1e30 if worker.step + 1 == PLANTED else 1.0)

    step = worker.stepper(model, optim, loss_of, clip_norm=0.5)
    norms = []
    for batch in worker.batches(data()):
        if not plain:
            step(batch)
            norms.append(float(step.grad_norm))
            continue
        for x, y in batch:
            worker.backward(loss_of(model(x), y))
        norms.append(float(worker.clip_gradients(0.5)))
        optim.step()
        optim.zero_grad()
    return {"norms": norms, "weights": [parameter.detach().clone() for parameter in model.parameters()]}


@pytest.mark.parametrize(
    ("workers", "plain"),
    [(2, False), (3, True), quick.further(1, False), quick.further(1, True), quick.further(4, False)],
)
def test_it_is_torchs_own_loop_with_a_grad_scaler(world: World, workers: int, plain: bool) -> None:
    oracle = by_torch()
    del oracle["norms"][PLANTED - 1]  # it is not finite
    found = world(functools.partial(planted, plain=plain), workers, Plan(batch=BATCH, compute=fp16()))
    for rank, result in enumerate(found):
        assert [scale for scale, _ in scales(world, rank)] == oracle["scales"]
        assert [skipped for _, skipped in scales(world, rank)] == [number == PLANTED for number in range(1, 7)]
        assert [event.loss for event in steps(world, rank)] == pytest.approx(oracle["losses"], rel=WITHIN)
        for mine, others in zip(result["weights"], oracle["weights"], strict=True):
            torch.testing.assert_close(mine, others, rtol=WITHIN, atol=1e-3)
        del result["norms"][PLANTED - 1]
        assert result["norms"] == pytest.approx(oracle["norms"], rel=WITHIN)
    assert oracle["scales"] == [2.0**12] * 3 + [2.0**13] + [2.0**12] * 2
    assert told(world, Note)[-1] == "step 4 was skipped: its gradients overflowed in fp16; the loss scale is now 4096"
    assert not any("skipped" in text for text in told(world, Warned)), "it is not broken"
    assert steps(world)[-1].optimizer["overflows"] == 1


# ---------------------------------------------------------------------------------------------------- layouts and wires


def attending(worker: Any, *, is_routed: bool = False) -> list[float]:
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet() if is_routed else Net(0.0), buffers={} if is_routed else {"seen": "mean"})
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return next_word(output.float(), target) * (1e30 if worker.step + 1 == PLANTED else 1.0)

    step = worker.stepper(model, optim, loss_of, clip_norm=0.5)
    return [float(step(batch)) for batch in worker.batches(Text(ROWS), epochs=2)]


@functools.cache
def in_one_process(*, is_routed: bool = False) -> tuple[list[float], list[tuple[float, bool]]]:
    one = World(lasting.folder("in_one_process"))
    train = functools.partial(attending, is_routed=is_routed)
    (losses,) = one(train, 1, Plan(batch=SHUFFLED, compute=fp16()), save_at_end=False)
    return losses, scales(one)


LAYOUTS = [
    Layout(shard=2),
    Layout(stages=2),
    quick.further(Layout(tensor=2)),
    quick.further(Layout(context=2)),
    quick.further(Layout(shard=2, zero=1)),
    quick.further(Layout(shard=2, zero=2)),
    quick.further(Layout(replicas=2, stages=2, schedule="zero-bubble")),
    quick.further(Layout(shard=2, tensor=2)),
    quick.further(Layout(experts=2)),
    quick.further(Layout(replicas=3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_layout_has_the_scale_and_the_losses_of_one_process(world: World, layout: Layout) -> None:
    is_routed = layout.experts > 1
    expected, scales_alone = in_one_process(is_routed=is_routed)
    split, train = (
        Plan(batch=SHUFFLED, compute=fp16(), layout=layout),
        functools.partial(attending, is_routed=is_routed),
    )
    for rank, losses in enumerate(world(train, workers_of(layout), split, save_at_end=False)):
        assert scales(world, rank) == scales_alone
        assert losses == pytest.approx(expected, rel=2 * WITHIN)
    assert [skipped for _, skipped in scales_alone] == [number == PLANTED for number in range(1, 7)]


class Weighted(nn.Module):
    """Of operations that autocast leaves in fp32, so that powers of two change no digit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Parameter(torch.randn(6, 40)), nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.unsqueeze(2) * self.first).sum(1).tanh() * self.second).sum(1)


def weighted(worker: Any, *, is_counted: bool = False) -> list[Tensor]:
    model = worker.prepare(Weighted())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

    def loss_of(output: Tensor, target: Tensor) -> Any:
        loss = F.mse_loss(output, target.float(), reduction="none")
        used = target > 0  # of so many samples another number in each micro-batch
        return ((loss * used).sum(), used.sum()) if is_counted else loss.mean()

    step = worker.stepper(model, optim, loss_of)
    for batch in worker.batches(data(), epochs=2):
        step(batch)
    return [local_part(parameter.detach()).clone() for parameter in model.parameters()]


WIRES = {
    "raw": {},
    "alone": {},
    "counted": {},
    "topk": {"wire": TopK(ratio=0.1)},
    "int8": {"wire": Int8()},
    "onebit": {"wire": OneBit()},
    "powersgd": {"wire": PowerSGD(rank=2)},
    "cast": {"wire": Cast(dtype="fp16", feedback=True)},
    "adasum": {"sync": AllReduce(op="adasum")},
    "servers": {"sync": ParameterServer(servers=1)},
    "local": {"sync": LocalSGD(every=3)},
    "diloco": {"sync": LocalSGD(every=3, outer=Nesterov())},
    "gossip": {"sync": Gossip()},
    "shard": {"layout": Layout(shard=2), "wire": TopK(ratio=0.1)},
}


OFTEN = ("alone", "counted", "topk", "servers", "local")


@pytest.mark.parametrize("name", [name if name in OFTEN else quick.further(name) for name in WIRES])
def test_no_wire_and_no_sync_knows_of_the_scale(world: World, tmp_path: Path, name: str) -> None:
    """The scale doubles in each step; weights, norms and the noise scale are those of fp32 to the last bit."""
    about: dict[str, Any] = WIRES[name]
    plain, train = beside(tmp_path), functools.partial(weighted, is_counted=name == "counted")
    workers = 1 if name == "alone" else 2
    expected = plain(train, workers, Plan(batch=BATCH, **about), save_at_end=False)
    scaled = Plan(batch=BATCH, compute=fp16(loss_scale_start=1, loss_scale_window=1), **about)
    found = world(train, workers, scaled, save_at_end=False)
    for mine, others in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert [scale for scale, _ in scales(world)] == [2.0**number for number in range(12)]
    for mine, others in zip(steps(world), steps(plain), strict=True):
        assert (mine.loss, mine.noise_scale) == (others.loss, others.noise_scale)
        assert mine.optimizer.get("grad_norm") == others.optimizer.get("grad_norm")
    assert name not in ("alone", "topk") or steps(plain)[-1].noise_scale is not None, "it was compared, too"


def asynchronous(worker: Any) -> list[float]:
    model = worker.prepare(small())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    made = 0

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target) * (1e30 if made == 1 else 1.0)

    step = worker.stepper(model, optim, loss_of)
    losses = []
    for batch in worker.batches(data(), epochs=4):
        losses.append(float(step(batch)))
        made += 1
    return losses


@pytest.mark.parametrize(
    "sync",
    [
        ParameterServer(staleness=1),
        quick.further(ParameterServer(drop=1)),
        quick.further(LocalSGD(every=2)),
        quick.further(Gossip()),
    ],
    ids=str,
)
def test_replicas_that_take_steps_by_themselves_have_a_scale_each(world: World, sync: Any) -> None:
    found = world(asynchronous, 2, Plan(batch=BATCH, compute=fp16(loss_scale_window=100), sync=sync))
    for rank, losses in enumerate(found):
        if len(losses) > 1 and sync != ParameterServer(drop=1):  # else a share may come too late to overflow
            assert scales(world, rank)[:3] == [(2.0**12, False), (2.0**12, True), (2.0**11, False)][: len(losses)]
        assert math.isfinite(losses[-1]) and 2.0**8 <= scales(world, rank)[-1][0] <= 2.0**12
    assert sum(map(len, found)) >= 24


# ---------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(("first", "second"), [(2, 3), quick.further(1, 2)])
def test_the_scale_and_its_counts_come_back_on_other_workers(
    world: World, tmp_path: Path, first: int, second: int
) -> None:
    plan, whole = Plan(batch=BATCH, compute=fp16()), beside(tmp_path)
    whole(planted, 1, plan)
    world(planted, first, plan, max_steps=PLANTED + 1)
    before = scales(world)
    world(planted, second, plan)
    for rank in range(second):
        assert before + scales(world, rank) == scales(whole)
    assert steps(world)[-1].optimizer["overflows"] == 1


def test_a_run_goes_on_in_another_precision(world: World) -> None:
    world(planted, 2, Plan(batch=BATCH), max_steps=2)
    world(planted, 2, Plan(batch=BATCH, compute=fp16(loss_scale=512, loss_scale_start=65536.0, loss_scale_window=2000)))
    assert [scale for scale, _ in scales(world)] == [512.0] * 4
    assert any("step 4 was skipped on all workers" in text and "scale of 512" in text for text in told(world, Warned))


# ------------------------------------------------------------------------------------------- guard, limits and refusals


@pytest.mark.parametrize("on_spike", ["stop", quick.further("rollback")])
def test_an_overflow_of_the_scale_is_no_spike(world: World, on_spike: Any) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(small())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=4, gamma=0.5))
        step = worker.stepper(model, optim, lambda output, y: F.cross_entropy(output.float(), y))
        for batch in worker.batches(data(), epochs=2):
            step(batch)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch's, that the optimizer has not stepped before the schedule
                schedule.step()
        assert schedule.last_epoch == worker.step == 12, "the schedule goes on with the steps"

    world(train, 2, Plan(batch=BATCH, guard=Guard(on_spike=on_spike), compute=fp16(loss_scale_start=2.0**25)))
    skipped = [skipped for _, skipped in scales(world)]
    assert all(skipped[:4]) and not all(skipped)
    notes = [text for text in told(world, Note) if "overflowed" in text]
    assert notes[2] == (
        "step 3 was skipped: its gradients overflowed in fp16; the loss scale is now 4194304; further ones in a row "
        "are not reported"
    )
    assert len(notes) < sum(skipped)
    assert not [text for text in told(world, Note, 1) if "overflowed" in text], "one worker says it"


def always(worker: Any) -> None:
    model = worker.prepare(small())
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, lambda output, y: F.cross_entropy(output.float(), y) * 1e30)
    for batch in worker.batches(data(), epochs=9):
        step(batch)


def test_a_scale_that_cannot_be_lower_ends_the_run_with_what_to_do(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"20 steps in a row overflowed in fp16, whose loss scale .* than 1 .*bf16"):
        world(always, 2, Plan(batch=BATCH, compute=fp16(loss_scale_start=4)))
    assert [scale for scale, _ in scales(world)] == [4.0, 2.0, *[1.0] * 19]


def test_a_scaler_of_the_scripts_own_and_weights_of_sixteen_bits_are_refused(world: World) -> None:
    def train(worker: Any) -> list[str]:
        said = []
        try:
            worker.prepare(small().half(), name="half")
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
        model = worker.prepare(small())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        try:
            for batch in worker.batches(data()):
                for x, y in batch:
                    worker.backward(scaler.scale(F.cross_entropy(model(x).float(), y)))
        except RuntimeError as error:
            said.append(str(error))
        return said

    for half, scaler in world(train, 2, Plan(batch=BATCH, compute=fp16()), save_at_end=False):
        assert half.startswith("PlanError 0.weight is trained and has 16 bits") and "model.float()" in half
        assert scaler.startswith("Compute(precision='fp16') scales losses itself")
