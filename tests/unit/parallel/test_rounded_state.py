"""Optimizer state in bf16: unbiased rounding, the same on any part of a tensor, and steps of the optimizer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from imported import Later
from paceline.parallel.rounded_state.rounded_stepping import RoundedStepping, StepCount, copies_of_weights
from paceline.parallel.rounded_state.stochastic_rounding import (
    ElementIndex,
    random_bits,
    round_stochastically,
    rounding_key,
)
from paceline.parallel.step_takeover import take_over_step, unhooked_step

pytorch_optimizer: Any = Later("pytorch_optimizer")


def index_of(*shape: int) -> ElementIndex:
    return ElementIndex(shape, [torch.arange(size) for size in shape])


def rounded(value: torch.Tensor, step: int = 0) -> torch.Tensor:
    return round_stochastically([value], index_of(*value.shape), rounding_key(0, step, "weight"))[0]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1.001, -3.3e-5, 1.7e-30, 0.0078, 4.2e37])
def test_rounding_is_unbiased_and_goes_to_one_of_the_two_neighbors(number: float) -> None:
    """The mean over 2^20 numbers is within five standard deviations of the number."""
    value = torch.full((1024, 1024), number)
    found = rounded(value).double()
    low, high = sorted(set(found.flatten().tolist()))
    exact = float(value[0, 0].double())
    assert low < exact < high
    assert torch.tensor(low, dtype=torch.bfloat16).nextafter(torch.tensor(high, dtype=torch.bfloat16)).item() == high
    share = (exact - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / found.numel()) ** 0.5
    assert abs(float(found.mean()) - exact) < 5 * deviation


def test_what_bf16_holds_stays_and_what_is_not_finite_does_too() -> None:
    held = torch.randn(4096).to(torch.bfloat16).float()
    for step in range(3):
        assert torch.equal(rounded(held, step).float(), held)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    found = rounded(odd)
    assert torch.equal(found[:2].float(), odd[:2]) and found[2].isnan() and torch.equal(found[3:].float(), odd[3:])


def test_a_part_of_a_tensor_is_rounded_as_it_is_in_the_whole() -> None:
    whole = torch.randn(7, 6, 4)
    places = [torch.tensor([2, 3, 4]), torch.tensor([0, 1, 4, 5]), torch.arange(4)]
    part = whole[2:5][:, [0, 1, 4, 5]]
    found = round_stochastically([part], ElementIndex((7, 6, 4), places), rounding_key(0, 0, "weight"))[0]
    assert torch.equal(found, rounded(whole)[2:5][:, [0, 1, 4, 5]])


def test_bits_are_even_and_independent_of_neighbors_steps_names_and_entries() -> None:
    index = torch.arange(1 << 18, dtype=torch.int32)
    first = random_bits(index, rounding_key(0, 1, "a"))
    others = [random_bits(index, rounding_key(*key)) for key in ((0, 2, "a"), (0, 1, "b"), (1, 1, "a"))]
    halves = [first & 0xFFFF, (first >> 16) & 0xFFFF]
    drawn = [*halves, *(one & 0xFFFF for one in others), halves[0].roll(1)]
    numbers = torch.stack([one.double() for one in drawn])
    assert numbers.mean(1).tolist() == pytest.approx([32767.5] * len(drawn), abs=5 * 65536 / (12 * len(index)) ** 0.5)
    apart = numbers.corrcoef() - torch.eye(len(drawn))
    assert float(apart.abs().max()) < 5 / len(index) ** 0.5
    for bit in range(16):
        assert float(((halves[0] >> bit) & 1).double().mean()) == pytest.approx(0.5, abs=0.005)


def stepping(optimizer: torch.optim.Optimizer, **how: Any) -> RoundedStepping:
    found = RoundedStepping(
        optimizer,
        unhooked_step(optimizer),
        **{"seed": 0, "count": StepCount(), "name_of": lambda _: "weight", "slice_of": lambda _: None, **how},
    )
    take_over_step(optimizer, lambda: found.step(optimizer))
    return found


def after(kind: str, optimizer: torch.optim.Optimizer, entry: str, num_steps: int, gradient: float) -> None:
    """Take steps with small gradients after an average of squares has seen large ones."""
    (parameter,) = optimizer.param_groups[0]["params"]
    if kind == "stochastic":
        stepping(optimizer)
    for number in range(num_steps):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        state = optimizer.state[parameter]
        if number == 0:
            state[entry].fill_(1.0)
            parameter.detach().zero_()
        if kind == "nearest":
            state[entry] = state[entry].to(torch.bfloat16).float()


def second_moment(kind: str) -> float:
    """What Adam's average of squares falls to."""
    parameter = torch.nn.Parameter(torch.zeros(1024))
    optimizer = torch.optim.Adam([parameter], lr=0.0, betas=(0.9, 0.999))
    after(kind, optimizer, "exp_avg_sq", 400, 0.0)
    return float(optimizer.state[parameter]["exp_avg_sq"].float().mean())


@pytest.mark.thorough
def test_an_average_with_a_long_memory_follows_where_rounding_to_nearest_stands_still() -> None:
    assert second_moment("nearest") == 1.0
    assert second_moment("fp32") == pytest.approx(0.999**399, rel=1e-4)
    assert second_moment("stochastic") == pytest.approx(0.999**399, rel=0.01)


def distance(kind: str) -> float:
    """How far RMSprop comes on a slope."""
    parameter = torch.nn.Parameter(torch.zeros(256))
    after(kind, torch.optim.RMSprop([parameter], lr=1e-3, alpha=0.999), "square_avg", 800, 1e-3)
    return -float(parameter.detach().mean())


@pytest.mark.thorough
def test_training_goes_on_where_state_rounded_to_nearest_stalls_it() -> None:
    exact, stochastic, nearest = (distance(one) for one in ("fp32", "stochastic", "nearest"))
    assert stochastic == pytest.approx(exact, rel=0.02)
    assert nearest < 0.85 * exact


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False, "amsgrad": True}])
def test_any_implementation_of_a_step_computes_in_fp32_and_keeps_bf16(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(()))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    stepping(optimizer, name_of=lambda one: f"p{one.dim()}")
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    state = optimizer.state[parameters[0]]
    kinds = {key: value.dtype for key, value in state.items()}
    step = kinds.pop("step")
    assert set(kinds.values()) == {torch.bfloat16} and step == torch.float32
    assert all(one.dtype == torch.float32 for one in optimizer.state[parameters[1]].values()), "single numbers stay"
    saved = {key: value.clone() for key, value in state.items()}
    optimizer.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[parameters[0]].items():
        assert torch.equal(value, saved[key]) and value.dtype == saved[key].dtype, "loaded to the bit"


def test_options_that_count_steps_do_so_once_a_step_however_many_groups_there_are() -> None:
    class Counts(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    parameters = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    optimizer = Counts([{"params": [one]} for one in parameters], lr=0.1, momentum=0.9)
    names = {id(one): f"p{k}" for k, one in enumerate(parameters)}
    stepping(optimizer, name_of=lambda one: names[id(one)])
    for _ in range(3):
        for one in parameters:
            one.grad = torch.ones_like(one)
        optimizer.step()
    assert [group["count"] for group in optimizer.param_groups] == [3, 3, 3]
    assert [group["params"] for group in optimizer.param_groups] == [[one] for one in parameters]
    for one in parameters:  # each was stepped as often as the others, and its momentum was rounded by itself
        torch.testing.assert_close(one, parameters[0], rtol=0.01, atol=0.01)


@pytest.mark.thorough
def test_an_optimizer_inside_another_steps_no_more_often() -> None:
    found: list[torch.Tensor] = []
    for is_rounded in (False, True):
        parameter, other = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
        inner = torch.optim.SGD([{"params": [parameter]}, {"params": [other]}], lr=0.25, momentum=0.5)
        optimizer = pytorch_optimizer.Lookahead(inner, k=2)
        if is_rounded:
            stepping(optimizer)
        for _ in range(3):
            parameter.grad, other.grad = torch.ones(4), torch.ones(4)
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.thorough
def test_copies_of_the_weights_stay_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    assert copies_of_weights(pytorch_optimizer.ScheduleFreeAdamW([parameter], lr=0.1)) == {"z"}
    assert copies_of_weights(torch.optim.AdamW([parameter], lr=0.1)) == set()
