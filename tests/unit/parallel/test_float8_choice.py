"""Which linear layers compute in FP8, and what is refused, with which remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

from paceline.errors import PlanError
from paceline.parallel.check.model_check import check_model
from paceline.parallel.float8 import choose_linears, require_float8
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


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_are_computed_are_left_and_not_asked_for() -> None:
    def made(change: Callable[[nn.Linear], Any]) -> nn.Linear:
        layer = nn.Linear(32, 32)
        change(layer)
        return layer

    normed = made(parametrizations.spectral_norm)
    kinds = {
        "normed": normed,
        "old": made(utils.weight_norm),
        "spectral": made(utils.spectral_norm),
        "pruned": made(lambda layer: prune.random_unstructured(layer, "weight", 0.5)),
        "lazy": nn.LazyLinear(32),
        "plain": nn.Linear(32, 32),
    }
    before = {name: one.clone() for name, one in normed.named_buffers()}
    found = choose_linears(nn.ModuleDict(kinds), fp8(fp8_layers="all"))
    assert found.names == ("plain",)
    assert found.left == {
        "weights are computed anew for each forward": ["normed", "old", "spectral", "pruned"],
        "of a class of their own": ["lazy"],
    }
    assert all(torch.equal(before[name], one) for name, one in normed.named_buffers())


@pytest.mark.thorough
def test_adapters_of_peft_are_left_whatever_their_rank() -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["up", "out"])
    model = peft.get_peft_model(Model(), config)
    layers = [f"base_model.model.layers.{number}.up" for number in range(2)]
    assert choose_linears(model, fp8()).names == tuple(f"{one}.base_layer" for one in layers)
    found = choose_linears(model, fp8(fp8_layers="all"))
    assert found.names == tuple(f"{one}.base_layer" for one in (*layers, "base_model.model.out"))
    assert [one.split(".lora_")[1] for one in found.left["adapters of peft"]] == ["A.default", "B.default"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["", "import torchao; "])
def test_what_the_import_of_torchao_always_says_is_not_passed_on(first: str) -> None:
    """Programs that import it themselves, as those with peft do, hear it: loggers are left as they are."""
    text = (
        f"{first}from torch import nn; from paceline.parallel.float8 import choose_linears; import logging; "
        "from paceline.plan import Compute; compute = Compute(precision='fp8', fp8_emulate=True); "
        "model = nn.Sequential(nn.Linear(16, 16)); choose_linears(model, compute).apply(model); "
        "assert type(model[0]).__name__ == 'AutocastFloat8Linear'; "
        "logging.getLogger('torchao').warning('Failed to load what matters')"
    )
    said = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True).stderr
    lines = [line for line in said.splitlines() if "torchao" in line or "_pytree" in line or "Failed" in line]
    assert lines[-1:] == ["Failed to load what matters"]
    assert first or len(lines) == 1
