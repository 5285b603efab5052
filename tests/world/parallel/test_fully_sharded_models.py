"""Models of many kinds under sharded layouts train as in one process, or are refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import TensorDataset

import quick
from forked import WorkersFailed, World
from paceline.comm.sharded_tensors import full_tensor
from paceline.errors import PlanError
from paceline.parallel.partial_state import reading_parts
from paceline.plan import Batch, Cast, Compute, Guard, Layout, Plan

EXACT = Compute(precision="fp64")
BATCH = Batch(size=12, micro=3)
TWO = Layout(replicas=2, shard=2)


def dataset(count: int = 42) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, width))


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Sequential(*[block(width) for _ in range(3)]), nn.Linear(width, 4))


def state_of(*models: nn.Module) -> dict[str, Tensor]:
    with reading_parts():
        return {
            f"{n}.{key}": full_tensor(value).clone()
            for n, m in enumerate(models)
            for key, value in m.state_dict().items()
        }


def same(results: list[Any], oracle: Any, tolerance: float = 1e-9) -> None:
    for result in results:
        assert result[0] == pytest.approx(oracle[0], rel=tolerance)
        for name, value in oracle[1].items():
            torch.testing.assert_close(
                result[1][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def steps(worker: Any, model: nn.Module, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    loss = options.pop("loss", None if "forward" in options else F.cross_entropy)
    step = worker.stepper(model, optim, loss, **options)
    return [float(step(batch)) for batch in worker.batches(dataset(), epochs=2)], state_of(model)


class Choosy(nn.Module):
    """Which of its blocks is used follows from the data: another one in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([block() for _ in range(4)])
        self.head = nn.Linear(8, 4)
        self.others = nn.ModuleList([nn.Linear(4, 4), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for one in self.blocks:  # every unit runs on all workers, or all-gathers would not match
            hidden = hidden + one(hidden)
        out = self.head(hidden)
        return self.others[0](out) if float(x.sum()) > 0 else out


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="FSDP sums gradients of all parameters of a unit since torch 2.13"
)
@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_that_only_some_micro_batches_use(world: World, zero: Any) -> None:
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=EXACT)
    same(world(lambda w: steps(w, Choosy()), 2, plan), world.one_process(lambda w: steps(w, Choosy()), plan_of(plan)))


def plan_of(plan: Plan) -> Plan:
    """The same for one process."""
    return Plan(batch=plan.batch, compute=plan.compute, guard=plan.guard)


class Twice(nn.Module):
    """Runs its blocks twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(6, 8), nn.ModuleList([block(), block()]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for one in [*self.blocks, *self.blocks]:
            hidden = hidden + one(hidden)
        return self.head(hidden)


class TiedBlocks(nn.Module):
    """Two blocks share a layer, and the head shares one with a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        made = [nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(4)]
        made[1].get_submodule("0").weight = made[0].get_parameter("0.weight")
        self.out = nn.Linear(12, 8)
        self.out.weight = made[2].get_parameter("2.weight")
        self.blocks = nn.ModuleList(made)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for one in self.blocks:
            hidden = hidden + one(hidden)
        return self.last(self.out(torch.cat([hidden, hidden[:, :4]], dim=1)))


@pytest.mark.parametrize(
    ("zero", "make"),
    [
        *[(1, Twice), (3, Twice), (2, TiedBlocks), (3, TiedBlocks)],
        *[quick.further(2, Twice), quick.further(1, TiedBlocks)],
    ],
)
def test_units_that_run_twice_and_units_that_share(world: World, make: Callable[[], nn.Module], zero: Any) -> None:
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=EXACT)
    same(world(lambda w: steps(w, make()), 2, plan), world.one_process(lambda w: steps(w, make()), plan_of(plan)))


@pytest.mark.parametrize("zero", [1, 3])
def test_blocks_that_recompute(world: World, zero: Any) -> None:
    compute = Compute(precision="fp64", recompute="blocks")
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=compute)
    same(world(lambda w: steps(w, net()), 2, plan), world.one_process(lambda w: steps(w, net()), plan_of(plan)))


def counted(worker: Any) -> Any:
    """Losses as (sum, count): the count of a step is known only at its end."""

    def forward(model: nn.Module, micro: Any) -> tuple[Tensor, Tensor]:
        x, y = micro
        kept = y != 3
        return F.cross_entropy(model(x)[kept], y[kept], reduction="sum"), kept.sum()

    return steps(worker, net(), forward=forward, clip_norm=0.3)


def test_losses_with_counts(world: World) -> None:
    plan = Plan(layout=TWO, batch=BATCH, compute=EXACT)
    same(world(counted, 4, plan), world.one_process(counted, plan_of(plan)))


def adversaries(worker: Any) -> Any:
    """Two models and two optimizers, with a gradient pass each, as in a GAN."""
    maker, judge = worker.prepare(net()), worker.prepare(net())
    makers = worker.prepare(torch.optim.Adam(maker.parameters(), lr=0.01))
    judges = worker.prepare(torch.optim.Adam(judge.parameters(), lr=0.01))

    def fool(_: Any, micro: Any) -> Tensor:
        return -F.cross_entropy(judge(F.pad(maker(micro[0]), (0, 2))), micro[1])

    def tell(_: Any, micro: Any) -> Tensor:
        return F.cross_entropy(judge(F.pad(maker(micro[0]).detach(), (0, 2))), micro[1])

    step_maker = worker.stepper(maker, makers, forward=fool)
    step_judge = worker.stepper(judge, judges, forward=tell)
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        losses += [float(step_judge(batch)), float(step_maker(batch))]
    return losses, state_of(maker, judge)


@pytest.mark.parametrize("zero", [1, quick.further(2), 3])
def test_two_models_in_turn(world: World, zero: Any) -> None:
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=EXACT)
    same(world(adversaries, 2, plan), world.one_process(adversaries, plan_of(plan)))


def thawing(worker: Any) -> Any:
    model = net()
    for parameter in model.get_submodule("1").parameters():
        parameter.requires_grad_(False)
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, F.cross_entropy)
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        if worker.step == 3:
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        losses.append(float(step(batch)))
    return losses, state_of(model)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_that_are_thawed(world: World, zero: Any) -> None:
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=EXACT)
    same(world(thawing, 2, plan), world.one_process(thawing, plan_of(plan)))


class Adapted(nn.Module):
    """A frozen layer in 16 bits, of an odd size, with a low-rank adapter in fp32, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(7, 3, bias=False), nn.Linear(3, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


def adapted(worker: Any) -> Any:
    torch.manual_seed(4)
    model = worker.prepare(nn.Sequential(nn.Linear(6, 7), nn.Sequential(Adapted(), Adapted()), nn.Linear(7, 4)))
    trained = [one for one in model.parameters() if one.requires_grad]
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(trained, lr=0.02)), F.cross_entropy)
    losses = [float(step(batch)) for batch in worker.batches(dataset())]
    if worker.plan.layout.shard > 1:
        model.requires_grad_(True)
        with pytest.raises(PlanError, match="bfloat16 and float32"):
            for batch in worker.batches(dataset()):
                step(batch)
    return losses


@pytest.mark.parametrize("zero", [1, 3])
def test_adapters_in_fp32_on_a_frozen_base_in_16_bits(world: World, zero: Any) -> None:
    expected = world.one_process(adapted, Plan(batch=BATCH))
    for found in world(adapted, 2, Plan(layout=Layout(shard=2, zero=zero), batch=BATCH)):
        assert found == pytest.approx(expected, rel=2e-3)


def test_gradients_that_travel_in_sixteen_bits_between_replicas(world: World) -> None:
    plan = Plan(layout=TWO, batch=BATCH, wire=Cast(dtype="bf16"))
    results = world(lambda w: steps(w, net()), 4, plan)
    oracle = world.one_process(lambda w: steps(w, net()), plan_of(plan))
    same(results, oracle, 5e-2)
    assert results[0][0] == results[3][0] != oracle[0]


def test_bf16_is_near_and_fp32_is_nearer(world: World) -> None:
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 3e-2)):
        plan = Plan(layout=Layout(shard=2), batch=BATCH, compute=Compute(precision=precision))  # type: ignore[arg-type]  # one of the words, as parametrized
        results = world(lambda w: steps(w, net())[0], 2, plan)
        oracle = world.one_process(lambda w: steps(w, net())[0], plan_of(plan))
        assert results[0] == pytest.approx(oracle, rel=tolerance), precision
        world.run_dir = world.run_dir.with_name(precision)


def spiky(worker: Any) -> Any:
    """One step's loss leaps: the run goes back to its snapshot."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    number = [0]

    def forward(model: nn.Module, micro: Any) -> Tensor:
        return F.cross_entropy(model(micro[0]), micro[1]) * (1e4 if number[0] == 9 else 1.0)

    step = worker.stepper(model, optim, forward=forward)
    losses = []
    for batch in worker.batches(dataset(), epochs=4):
        number[0] += 1
        losses.append(float(step(batch)))
    return losses, state_of(model)


@pytest.mark.parametrize("layout", [Layout(shard=2, zero=1), TWO], ids=str)
def test_a_spike_rolls_back_split_state(world: World, layout: Layout) -> None:
    plan = Plan(
        layout=layout,
        batch=BATCH,
        compute=EXACT,
        guard=Guard(on_spike="rollback", window=8, snapshot_every=3, check_every=2 if layout is TWO else 0),
    )
    oracle = Plan(batch=BATCH, compute=EXACT, guard=Guard(on_spike="rollback", window=8, snapshot_every=3))
    same(world(spiky, layout.workers or 2, plan), world.one_process(spiky, oracle))


def corrupted(worker: Any) -> Any:
    """One worker of three replicas has a broken bit in its rows, which the others outvote."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, F.cross_entropy)
    losses = []
    for batch in worker.batches(dataset(72)):
        losses.append(float(step(batch)))
        if worker.step == 2 and worker.rank == 3:
            with torch.no_grad():
                next(model.parameters()).to_local()[0, 0] += 1e-3
    return losses, state_of(model)


def test_replicas_compare_the_rows_that_they_have_in_common(world: World) -> None:
    plan = Plan(
        layout=Layout(replicas=3, shard=2),
        batch=Batch(size=12, micro=2),
        compute=EXACT,
        guard=Guard(check_every=2),
    )
    clean = Plan(batch=Batch(size=12, micro=2), compute=EXACT)
    oracle = world.one_process(corrupted_not, clean)
    same(world(corrupted, 6, plan), oracle)


def corrupted_not(worker: Any) -> Any:
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, F.cross_entropy)
    return [float(step(batch)) for batch in worker.batches(dataset(72))], state_of(model)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.zeros(3, 4).t())
        self.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.blocks[1].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))


def test_what_cannot_be_split_is_refused_at_once_by_name(world: World) -> None:
    with pytest.raises(WorkersFailed) as caught:
        world(lambda worker: worker.prepare(Odd()), 2, Plan(layout=Layout(shard=2), batch=BATCH))
    message = caught.value.errors[0]
    for part in (
        "Layout(shard=...) cannot split Odd:",
        "scale is a single number without a dim: make it nn.Parameter(torch.ones(1))",
        "turned is not contiguous in memory",
        "wave is of complex64",
        "blocks.1 mixes float32 and float64",
    ):
        assert part in message


class Skipping(Choosy):
    """Which of its blocks runs follows from the data."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.blocks[0] if float(x.sum()) > 0 else self.blocks[1]
        return self.head(chosen(self.first(x)))


def test_blocks_that_only_some_micro_batches_run_are_an_error_and_not_a_wrong_sum(world: World) -> None:
    plan = Plan(layout=Layout(shard=2), batch=BATCH, compute=EXACT)
    with pytest.raises(WorkersFailed, match="ran other blocks of the model than each other in batch"):
        world(lambda w: steps(w, Skipping()), 2, plan)


def leaves_early(worker: Any) -> Any:
    """One gradient pass is left in its middle, on all workers alike, and begun again."""
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    losses = []
    for batch in worker.batches(dataset(), epochs=2):
        if worker.step == 2:
            for x, y in batch:
                worker.backward(F.cross_entropy(model(x), y))
                break
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        optim.step()
        losses.append(worker.evaluate(model, dataset(10), F.cross_entropy)["loss"])
    return losses, state_of(model)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 made it possible")
@pytest.mark.parametrize("zero", [1, 3])
def test_a_pass_that_is_left_early_changes_nothing(world: World, zero: Any) -> None:
    plan = Plan(layout=Layout(shard=2, zero=zero), batch=BATCH, compute=EXACT)
    same(world(leaves_early, 2, plan), world.one_process(leaves_early, plan_of(plan)))


def test_a_model_without_data_is_refused_by_name(world: World) -> None:
    def run(worker: Any) -> None:
        with torch.device("meta"):
            model = net()
        worker.prepare(model)

    with pytest.raises(WorkersFailed, match=r"0\.weight and 15 more of Sequential have no data"):
        world(run, 2, Plan(layout=Layout(shard=2), batch=BATCH))
