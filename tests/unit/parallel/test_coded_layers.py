"""Layers whose weight is codes: how they run without weights, and that nothing packs their codes anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.parallel.coded_layers import coded_layers_as_linear, has_codes, keep_codes


class Coded(nn.Linear):
    """As 4-bit layers of packages: two codes in a byte, in one column, which only the layer's own forward can read."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, device="meta")
        self.weight: Any = nn.Parameter(torch.zeros(inputs * outputs // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.bias: Any = nn.Parameter(torch.ones(outputs), requires_grad=False)
        self.support_avx512bf16_for_cpu = 1

    def forward(self, input: Tensor) -> Tensor:
        raise AttributeError("no scales")


def test_layers_of_codes_are_told_from_others() -> None:
    stored = Coded(4, 6)
    stored.weight = nn.Parameter(torch.zeros(6, 1, dtype=torch.bfloat16), requires_grad=False)  # codes in bf16
    assert has_codes(Coded(4, 6)) and has_codes(stored)
    assert not has_codes(nn.Linear(4, 6)) and not has_codes(nn.Linear(4, 6).requires_grad_(False))
    assert not has_codes(nn.Embedding(4, 6))


def test_without_weights_they_return_what_a_linear_layer_would() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Coded(4, 6))
    with coded_layers_as_linear(model):
        out = model(torch.ones(2, 3))
        assert out.shape == (2, 6) and out.requires_grad and bool(out.isfinite().all())
        assert model.to("meta")(torch.ones(2, 3, dtype=torch.float32, device="meta")).shape == (2, 6)
    with pytest.raises(AttributeError, match="no scales"):
        model(torch.ones(2, 3, device="meta"))
    assert "forward" not in vars(model[1])


def test_codes_are_kept_and_those_that_were_packed_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Coded(4, 6))
    keep_codes(model)
    coded: Any = model[1]
    assert not coded.support_avx512bf16_for_cpu

    class Packed:
        packing_format_for_cpu = True

    coded.weight.quant_state = Packed()
    with pytest.raises(paceline.PlanError, match=r"packed the codes of 1 layers \(1, \.\.\.\).*Load the model again"):
        keep_codes(model)


def test_weights_that_are_computed_are_not_computed_to_look_for_codes() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    before = {name: one.clone() for name, one in layer.state_dict().items()}
    keep_codes(nn.Sequential(layer))
    assert not has_codes(layer)
    with coded_layers_as_linear(nn.Sequential(layer)):
        assert "forward" not in vars(layer)
    for name, one in layer.state_dict().items():
        assert torch.equal(one, before[name]), f"{name} has changed: spectral_norm steps each time it is computed"
