"""Which linear layers compute in FP8, and what is refused, with which remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.check.model_check import check_model
from paceline.parallel.float8 import choose_linears, require_float8
from paceline.parallel.float8_linear import use_float8
from paceline.plan import Compute, Plan

CPU = torch.device("cpu")


def fp8(**fields: Any) -> Compute:
    return Compute(precision="fp8", fp8_emulate=True, **fields)


class Own(nn.Linear):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 64), "gate": nn.Linear(32, 8)}) for _ in "ab")
        self.own, self.out, self.head = Own(32, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.words.weight


def test_layers_in_blocks_with_fitting_sizes_are_chosen() -> None:
    found = choose_linears(Model(), fp8())
    assert found.names == ("layers.0.up", "layers.1.up")
    assert found.left == {
        "sizes are no multiples of 16": ["layers.0.gate", "layers.1.gate"],
        "of a class of their own": ["own"],
        "outside of the repeated blocks": ["out"],
        "weights are shared with another module": ["head"],
    }


def test_options_widen_and_narrow_the_choice() -> None:
    assert choose_linears(Model(), fp8(fp8_layers="all")).names == ("layers.0.up", "layers.1.up", "out")
    assert choose_linears(Model(), fp8(fp8_skip="layers.0.*|own")).names == ("layers.1.up",)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    assert choose_linears(plain, fp8()).names == ("0",), "the last one is the head"


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        (nn.Sequential(nn.Linear(3, 5), nn.ReLU()), {}, "sizes are no multiples of 16: 0"),
        (nn.Sequential(nn.Conv2d(16, 16, 3)), {}, "it has none"),
        (Model(), {"fp8_skip": "*.absent"}, "'*.absent' matches no linear layer of Model, which has layers.0.up"),
    ],
)
def test_a_model_with_nothing_to_convert_is_refused(model: nn.Module, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        choose_linears(model, fp8(**fields))
    assert says in str(caught.value)


def test_a_check_of_a_plan_reports_it_with_all_else() -> None:
    found = check_model(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), Plan(compute=fp8()), device=CPU)
    assert ["found no linear layer of Sequential" in one.what for one in found.refusals] == [True]


def test_a_worker_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_float8(Compute(), CPU)
    require_float8(fp8(), CPU)
    with pytest.raises(PlanError, match="computes on the CPU, which has no products in FP8"):
        require_float8(Compute(precision="fp8"), CPU)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.0")
    with pytest.raises(PlanError, match=r"0\.18 or newer, and 0\.9\.0 is installed: pip install -U"):
        require_float8(fp8(), CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PlanError, match=r"which is not installed: pip install 'paceline\[fp8\]'"):
        require_float8(fp8(), CPU)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_layer_stays_the_same_object_and_rounds_to_eight_bits(recipe: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    weight, seen = layer.weight, list[str]()
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    exact = layer(x)
    exact.sum().backward()
    exact_gradient, x.grad, weight.grad = weight.grad, None, None
    use_float8(layer, recipe=recipe, emulates=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    found.float().sum().backward()
    assert seen == ["hook", "hook"] and layer.weight is weight and list(layer.state_dict()) == ["weight", "bias"]
    assert found.dtype == torch.bfloat16 and weight.grad is not None and weight.grad.dtype == torch.float32
    difference = (found.float() - exact).norm() / exact.norm()
    assert 0.005 < difference < 0.06, "8 bits are further away than bf16 (0.004)"
    assert exact_gradient is not None
    assert (weight.grad - exact_gradient).norm() / exact_gradient.norm() < 0.06
