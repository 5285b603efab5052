"""The parts of stages: units, backward in two halves, costs, seeds, and values in odd places."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stage_models
from paceline.errors import PlanError
from paceline.parallel.model_units import find_units, names_matching, seeded_units
from paceline.parallel.pipeline.find_stages import record_costs
from paceline.parallel.pipeline.random_draws import may_draw
from paceline.parallel.pipeline.split_backward import SplitBackward
from paceline.parallel.pipeline.stage_partition import closed_boundaries, partition_units, route
from paceline.parallel.pipeline.stage_replay import StageOutput, StageReplayer
from paceline.parallel.pipeline.stage_worker import bubble_share
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record
from paceline.schedule.pipeline import SCHEDULES, build
from paceline.schedule.pipeline_timeline import StageCost, ideal_bubble_share, simulate

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_share_of_waiting_is_that_of_a_step_whose_times_are_known(name: str) -> None:
    each = 2 if name == "interleaved" else 1
    pipeline = build(name, num_workers=4, num_micro=8, stages_per_worker=each)
    even = [StageCost() for _ in range(pipeline.num_stages)]
    for slow in (None, 0, 2, 3):
        costs = [StageCost(forward=5, backward_input=2) if stage == slow else cost for stage, cost in enumerate(even)]
        timeline = simulate(pipeline, costs)
        shares = [(busy, spans[-1][2]) for busy, spans in zip(timeline.busy, timeline.spans, strict=True)]
        assert len({whole for _, whole in shares}) > 1 or name == "zero-bubble", "not all are done at the same moment"
        assert bubble_share(shares) == pytest.approx(timeline.bubble_share)
        if slow is None:
            assert bubble_share(shares) == pytest.approx(ideal_bubble_share(pipeline))


def names(model: nn.Module, **more: Any) -> list[str]:
    return [unit.name for unit in find_units(model, **more)]


def test_units_are_blocks_and_what_has_parameters_around_them() -> None:
    assert names(stage_models.Tied(depth=2)) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert names(stage_models.ResNet()) == [
        "stem",
        "norm",
        *(f"layer{k}.{j}" for k in (1, 2, 3) for j in (0, 1)),
        "classifier",
    ]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))) == ["0", "2.0"]


def test_named_units_replace_what_would_be_found() -> None:
    model = stage_models.Tied(depth=2)
    assert names(model, named=["blocks.0.mlp"]) == [
        "embed",
        *(f"blocks.0.{part}" for part in ("norm", "mlp_norm", "qkv", "out", "mlp")),
        "blocks.1",
        "norm",
        "head",
    ]
    assert names(model, named=["blocks"]) == ["embed", "blocks", "norm", "head"]
    with pytest.raises(PlanError, match=r"'blocks.0.mlp' is inside 'blocks'; 'drop' has no parameters"):
        find_units(model, named=["blocks", "blocks.0.mlp", "drop"])


class Mixed(nn.Module):
    """A part of a stage with a product, a norm, an embedding in the middle, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)
        self.table, self.scale = nn.Embedding(3, 5), nn.Parameter(torch.ones(5, 5))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.first(x) + self.table(torch.tensor([0, 2, 0])))
        h = self.twice(torch.tanh(self.twice(h))) @ self.scale
        return h + y, self.table.weight.sum() + h.mean()


def two_ways(model: Mixed, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A vector that takes part as it is, and by what is computed from it; a matrix that does so in two products."""
    h = x * model.norm.weight.exp() + model.norm.weight
    return (F.linear(h @ model.scale, model.scale) + y,)


@pytest.mark.parametrize("code", [Mixed.__call__, two_ways])
def test_two_halves_of_a_backward_give_the_gradients_of_a_whole_one(code: Callable[..., tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    x, y = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs = code(model, x, y)
    arriving = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, arriving)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    inputs = {4: x.grad, 9: y.grad}
    model.zero_grad()
    x, y = (t.detach().requires_grad_() for t in (x, y))
    halves = SplitBackward(code(model, x, y), arriving, {4: x, 9: y})
    found = halves.do_inputs()
    for number, gradient in inputs.items():
        torch.testing.assert_close(found[number], gradient)
    halves.do_weights()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, msg=name)


def test_weights_of_products_wait_for_the_second_half_and_hooks_run_there() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    halves = SplitBackward([model(x)], [torch.ones(2, 4)], {0: x})
    halves.do_inputs()
    assert sorted(arrived) == ["1.bias", "1.weight"]
    halves.do_weights()
    assert sorted(arrived) == sorted(dict(model.named_parameters()))


def test_operations_find_the_heavy_unit() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, width), nn.Linear(width, 64)) for width in (8, 8, 2048, 8)))
    micro, units = torch.randn(256, 64), find_units(model, named=["0", "1", "2", "3"])
    forward = lambda m: model(m).square().mean()  # noqa: E731  # as it is written where it is passed
    operations = record_costs(model, forward, micro, units=units, device=CPU).costs()
    assert operations == [2 * 2 * 256 * 64 * width for width in (8, 8, 2048, 8)]
    tape = record(model, forward, micro, units=units, device=CPU)
    cut = partition_units(model, tape, units=units, num_stages=3, costs=operations)
    assert cut.stages == (("0", "1"), ("2",), ("3",))


def stages_of(
    model: nn.Module,
    forward: Callable[[Any], Tensor],
    micro: Any,
    num_stages: int,
    seed: tuple[int, ...] | None = None,
    *,
    tape: Tape | None = None,
) -> tuple[Tape, list[StageOutput]]:
    """Run all stages of one model, whole, one after the other; gradients are added up in it."""
    units = find_units(model)
    tape = tape or record(model, forward, micro, units=units, device=CPU)
    way = route(tape, partition_units(model, tape, units=units, num_stages=num_stages, costs=[1.0] * len(tape.units)))
    parts: list[tuple[dict[int, Tensor], StageOutput]] = []
    arrived: dict[int, Tensor] = {}
    for stage in range(num_stages):
        received = {n: t.detach().requires_grad_(tape.values[n].has_gradient) for n, t in arrived.items()}
        replayer = StageReplayer(model, units, device=CPU)
        part = replayer.replay(forward, micro, tape=tape, route=way, stage=stage, received=received, seed=seed)
        parts.append((received, part))
        arrived = part.values
    parts[-1][1].result.backward()
    for stage in reversed(range(num_stages - 1)):
        numbers = way.with_gradient[stage]
        grads = [parts[stage + 1][0][n].grad for n in numbers]
        torch.autograd.backward([parts[stage][1].values[n] for n in numbers], grads)
    return tape, [part for _, part in parts]


class Leaves(nn.Module):
    """A block that leaves an auxiliary loss in an attribute, and sorts by contents, which the meta device cannot."""

    def __init__(self, sorts: bool) -> None:
        super().__init__()
        self.inner, self.sorts, self.aux = nn.Linear(6, 6), sorts, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.aux = h.square().mean()
        if self.sorts:
            chosen = torch.nonzero(h[:, 0] > 0).flatten()
            h = h.index_add(0, chosen, h[chosen])
        return h


class Cached(nn.Module):
    """A block that takes the first block's values by a closure, and keeps a mask that it makes once."""

    def __init__(self, early: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.early, self.mask = nn.Linear(6, 6), early, None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(6, device=x.device).cumsum(0)
        return self.inner(x) * self.mask + self.early[0]


class Shift(nn.Module):
    """A unit that does not keep its input for backward, so that it may be changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def losses_left(sorts: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    blocks = [Leaves(sorts) for _ in range(4)]

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x.mean() + torch.stack([block.aux for block in blocks]).sum()

    return nn.ModuleList(blocks), forward


def closure() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    early: list[Tensor] = []
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), Cached(early), Cached(early)])

    def forward(x: Tensor) -> Tensor:
        early[:] = [model[0](x)]
        return model[3](model[2](model[1](early[0]))).square().mean()

    return model, forward


def in_place() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = nn.ModuleList([nn.Linear(6, 6), Shift(), Shift(), nn.Linear(6, 6)])

    def forward(x: Tensor) -> Tensor:
        h = model[0](x)
        early = model[1](h)
        h += 1  # of the first stage, after the second one was to have had it
        out = torch.zeros(len(x), 12, dtype=x.dtype)
        out[:, :6] = model[2](early)
        out[:, 6:] = h
        early.mul_(2)  # what the last stage gets, when the one in between has had what it was
        early.add_(model[3](out[:, 3:9]))  # by the last stage, of what it has received
        return early.square().mean()

    return model, forward


@pytest.mark.parametrize(
    "build",
    [lambda: losses_left(False), lambda: losses_left(True), closure, in_place],
    ids=["aux", "moe", "closure", "in_place"],
)
def test_odd_ways_of_values_give_the_same_loss_and_gradients(build: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    model, forward = build()
    model.double()
    x = torch.randn(5, 6, dtype=torch.float64)
    loss = forward(x)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for num_stages in (2, 4):
        model.zero_grad()
        _, parts = stages_of(model, forward, x, num_stages)
        torch.testing.assert_close(parts[-1].result, loss)
        assert {name for name, p in model.named_parameters() if p.grad is not None} == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient, msg=name)


def test_a_recording_leaves_caches_weights_and_generators_as_they_were() -> None:
    model, forward = closure()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tape = record(model, forward, torch.randn(5, 6), units=find_units(model), device=CPU)
    moe, forward = losses_left(True)
    generator = torch.get_rng_state()
    record(moe, forward, torch.ones(5, 6), units=find_units(moe), device=CPU)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.mask is None for module in model.modules() if isinstance(module, Cached))
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert [call.is_open for call in tape.calls if call.is_unit] == [False, False, True, True]


class Stops(nn.Module):
    """A unit through which no gradient goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach())


def test_unused_parts_have_a_home_and_no_gradient() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.spare, self.b = nn.Linear(6, 6), nn.Linear(6, 6), Stops()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)).mean()

    model = Partly()
    tape, _ = stages_of(model, model, torch.randn(5, 6), 2)
    cut = partition_units(model, tape, units=find_units(model), num_stages=2)
    assert route(tape, cut).crossing == ((0,),) and route(tape, cut).with_gradient == ((),)
    assert tape.unused == {"spare": 0} and cut.stages == (("a", "spare"), ("b",))
    assert model.a.weight.grad is None and model.b.inner.weight.grad is not None


def test_autocast_is_recorded_in_the_types_that_it_really_has() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x) @ x.T).float().mean()

    x = torch.randn(5, 6)
    tape, parts = stages_of(model, forward, x, 3)
    assert [value.spec.dtype for value in tape.values[:4]] == [torch.bfloat16] * 4
    torch.testing.assert_close(parts[-1].result, forward(x))


def test_draws_between_units_are_those_of_one_process_also_after_another_stages_unit() -> None:
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(x: Tensor) -> Tensor:
        first = model[0](x)
        second = model[1](first)
        return (model[2](second) + F.dropout(first)).mean()  # the first stage draws, after the second one's unit

    x = torch.randn(5, 6)
    with seeded_units(find_units(model), 4):
        loss = forward(x)
    for num_stages in (2, 3):
        assert torch.equal(stages_of(model, forward, x, num_stages, (4,))[1][-1].result, loss)


class Dropping(nn.Linear):
    """A unit that draws."""

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(super().forward(input))


def mixed_up(h: Tensor) -> Tensor:
    share = torch.distributions.Beta(0.4, 0.4).sample()
    return share * h + (1 - share) * h.flip(0)


def by_gamma(h: Tensor) -> Tensor:
    return h * torch.distributions.Gamma(2.0, 1.0).sample(h.shape)


def leaky(h: Tensor) -> Tensor:
    return F.rrelu(h, training=True)


def pooled(h: Tensor) -> Tensor:
    return F.pad(F.fractional_max_pool2d(h[None], 2, output_size=(3, 4))[0], (1, 1, 1, 1))


def attended(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, None, 0.5)


def seeded_anew(h: Tensor) -> Tensor:
    """Moves a generator by no function of torch's that the recording sees."""
    torch.default_generator.manual_seed(torch.initial_seed() + 1)
    return h * (torch.initial_seed() % 7)


@pytest.mark.parametrize("draw", [mixed_up, by_gamma, leaky, pooled, attended, seeded_anew])
def test_whatever_draws_between_units_draws_the_same_as_in_one_process(draw: Callable[[Tensor], Tensor]) -> None:
    model = nn.ModuleList(Dropping(6, 6) for _ in range(3))

    def forward(x: Tensor) -> Tensor:
        for unit in model:
            x = draw(unit(x))
        return x.mean()

    x = torch.randn(5, 6)
    with seeded_units(find_units(model), 4):
        loss = forward(x)
    for num_stages in (2, 3):
        assert torch.equal(stages_of(model, forward, x, num_stages, (4,))[1][-1].result, loss)


def test_dropout_that_begins_later_draws_the_same_as_in_one_process() -> None:
    model, drop = nn.ModuleList(Dropping(6, 6) for _ in range(2)), nn.Dropout(0.0)
    noise = nn.RReLU().eval()

    def forward(x: Tensor) -> Tensor:
        return noise(model[1](drop(model[0](x)))).mean()

    x = torch.randn(5, 6)
    tape = record(model, forward, x, units=find_units(model), device=CPU)
    assert tape.draws_between and not tape.draws
    drop.p = 0.5
    noise.train()
    with seeded_units(find_units(model), 4):
        loss = forward(x)
    assert torch.equal(stages_of(model, forward, x, 2, (4,), tape=tape)[1][-1].result, loss)


def test_what_an_idle_dropout_hands_back_may_be_changed_in_place_by_a_later_unit() -> None:
    model, drop = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Dropout(0.0)

    def forward(x: Tensor) -> Tensor:
        x = drop(model[0](x))
        x += model[1](x)
        return x.sum()

    x = torch.randn(5, 6)
    tape = record(model, forward, x, units=find_units(model), device=CPU)
    assert not closed_boundaries(tape)


def test_nothing_is_seeded_again_where_nobody_draws_between_units() -> None:
    """Units draw, and some are run on invented numbers, to see what they return."""
    model = nn.Sequential(Dropping(6, 6), nn.ReLU(), Leaves(True), Dropping(6, 6))
    assert not record(
        model, lambda m: model(m).mean(), torch.randn(5, 6), units=find_units(model), device=CPU
    ).draws_between


def test_all_functions_are_known_that_torch_says_draw() -> None:
    marked = set[str]()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if (
            schema.name != name
            and not name.startswith(("_", "miopen_"))
            and any(callable(getattr(one, name, None)) for one in (torch, Tensor))
        ):
            overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            if torch.Tag.nondeterministic_seeded in overload.tags:
                marked.add(name)
    assert {"dropout", "rrelu_", "lstm", "uniform_"} <= marked
    assert not [name for name in sorted(marked) if not may_draw(name)]


def test_pythons_random_between_units_is_that_of_one_process_whatever_units_draw_from_it() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * random.random()

    model = nn.ModuleList(Noisy(6, 6) for _ in range(3))

    def forward(x: Tensor) -> Tensor:
        drawn.append(random.random())
        for unit in model:
            x = unit(x)
            drawn.append(random.random())
        return (x * drawn[-1]).mean()

    x, drawn = torch.randn(5, 6), list[float]()
    with seeded_units(find_units(model), 4):
        loss = forward(x)
    alone = drawn[:]
    assert len(set(alone)) == 4
    for num_stages in (2, 3):
        drawn.clear()
        assert torch.equal(stages_of(model, forward, x, num_stages, (4,))[1][-1].result, loss)
        assert drawn[len(alone) :] == alone * num_stages  # the first ones were the recording's


def test_a_replay_holds_nothing_that_the_forward_has_let_go_of() -> None:
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(x: Tensor) -> Tensor:
        for unit in model:
            x = unit(x)
            made.append(weakref.ref(x))
        alive.append(sum(one() is not None for one in made))
        return x

    made, alive = list[weakref.ref[Tensor]](), list[int]()
    x, units = torch.randn(5, 6), find_units(model)
    with torch.no_grad():
        tape = record(model, forward, x, units=units, device=CPU)
        made.clear()
        way = route(tape, partition_units(model, tape, units=units, num_stages=1))
        StageReplayer(model, units, device=CPU).replay(forward, x, tape=tape, route=way, stage=0, received={})
    assert alive[-1] == 1


def test_units_are_named_by_patterns_part_by_part() -> None:
    model = stage_models.Tied(depth=2)
    assert names_matching(model, ["blocks.*", "norm"]) == ("blocks.0", "blocks.1", "norm")
    assert names_matching(model, ["blocks.*.m*p"]) == ("blocks.0.mlp", "blocks.1.mlp")
    with pytest.raises(PlanError, match=r"units='layers\.\*' names no module of Tied, which has embed, blocks, blocks"):
        names_matching(model, ["layers.*", "norm"])
    with pytest.raises(PlanError, match=r"'drop' has no parameters; 'blocks\.0\.mlp' is inside 'blocks\.0'"):
        names_matching(model, ["blocks.0", "blocks.0.mlp", "drop"])
    with pytest.raises(PlanError, match=r"blocks of Tied is a ModuleList, .* name its members, 'blocks\.\*'"):
        names_matching(model, ["blocks"])
