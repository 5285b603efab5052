"""Forwards that spare the products of weights: of the same shapes, finite, and computed where numbers are needed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.parallel.sample_input import guess_sample
from paceline.parallel.spared_products import sparing_products
from paceline.parallel.tensor.find_plan import find_plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_products_with_weights_are_not_computed(dtype: torch.dtype, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 20, bias=bias), nn.Tanh(), nn.Linear(20, 4, bias=bias)).to(dtype)
    x = torch.randn(2, 3, 8, dtype=dtype)
    found = sparing_products(model, lambda: model(x))
    assert found.shape == (2, 3, 4) and found.dtype == dtype and found.requires_grad and bool(found.isfinite().all())
    assert found.flatten(0, 1).std(0).min() > 0 and len(set(found.flatten().tolist())) > 12, "columns and rows differ"
    again = sparing_products(model, lambda: model(x))
    assert torch.equal(found, again), "on all workers the same"
    assert torch.equal(model(x), model(x)) and not torch.equal(model(x), found)


def test_other_products_are_computed() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    assert torch.equal(sparing_products(model, lambda: x @ x.T), x @ x.T)


class Covariance(nn.Module):
    """Its numbers are needed: a product with the weight has to be the one with itself transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.down.weight
        torch.linalg.cholesky(torch.mm(weight.detach(), weight.detach().t()))
        return self.down(F.gelu(self.up(x)))


def test_code_that_needs_the_numbers_gets_them() -> None:
    model = Covariance().double()
    with torch.no_grad():
        model.down.weight.copy_(torch.eye(8, 16) + 0.01)
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(sparing_products(model, lambda: model(x)), model(x))
    found = guess_sample(model, size=2)
    plan = find_plan(model, size=2, sample=found)
    assert {row.name: row.role for row in plan.rows}.keys() == {"up", "down"}


def test_what_code_raises_by_itself_is_raised() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sparing_products(model, lambda: model(torch.ones(2, 5)))


def test_a_trial_of_a_deep_model_stays_finite() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(100))).bfloat16()
    found = sparing_products(model, lambda: model(torch.randn(4, 32).bfloat16()))
    assert bool(found.isfinite().all()) and bool((found != 0).any())


class Caching(nn.Module):
    """Keeps what it made of its weights for the forwards in evaluation mode to come."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.bias: Tensor | None = None
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.training:
            made: Tensor = self.up(torch.ones(1, 8)).detach()
            self.bias = self.seen["bias"] = made
        return self.down(torch.tanh(self.up(x) + self.bias))


def test_what_a_module_keeps_of_spared_products_does_not_stay() -> None:
    model, x = Caching().eval(), torch.randn(2, 8)
    expected = Caching().eval()
    expected.load_state_dict(model.state_dict())
    sparing_products(model, lambda: model(x))
    assert model.bias is None and not model.seen
    find_plan(model, size=2, sample=(x,))
    assert model.bias is None and torch.equal(model(x), expected(x))
