"""What a linear layer in FP8 computes, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear

from paceline.parallel.float8_linear import use_float8

pytestmark = pytest.mark.thorough  # torchao takes seconds to import
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


class Products(TorchDispatchMode):
    """Collects the matrix products that are computed while it lasts."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._found.append([one.shape for one in args])
        return func(*args, **(kwargs or {}))


def layer_of(recipe: str, *, is_frozen: bool = False, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=bias).requires_grad_(not is_frozen)
    use_float8(layer, recipe=recipe, emulates=True)
    return layer


@pytest.mark.parametrize("recipe", RECIPES)
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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows_give_no_rows(recipe: str, shape: tuple[int, ...]) -> None:
    layer, x = layer_of(recipe), torch.empty(shape, requires_grad=True)
    with autocast():
        found = layer(x)
    found.sum().backward()
    assert found.shape == (*shape[:-1], 48) and found.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.shape == shape
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_where_autocast_is_off_it_computes_as_written() -> None:
    layer, x = layer_of("tensorwise"), torch.randn(5, 32)
    plain = nn.Linear(32, 48)
    plain.load_state_dict(layer.state_dict())
    with autocast(), autocast(enabled=False):
        found, exact = layer(x), plain(x)
    found.square().sum().backward()
    exact.square().sum().backward()
    assert found.dtype == torch.float32 and torch.equal(found, exact)
    assert layer.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(layer.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_followed", [False, True])
def test_it_keeps_and_computes_what_gradients_need(recipe: str, is_frozen: bool, is_followed: bool) -> None:
    """A frozen base of LoRA keeps no inputs; a first layer has no gradient of its input."""
    layer, x = layer_of(recipe, is_frozen=is_frozen, bias=False), torch.randn(5, 32, requires_grad=is_followed)
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
        found = layer(x)
    assert kept == [(5, 32)] * (not is_frozen) + [(32, 48)] * is_followed
    assert found.requires_grad == (is_followed or not is_frozen)
    if found.requires_grad:
        products: list[Any] = []
        with Products(products):
            found.float().sum().backward()
        assert len(products) == (not is_frozen) + is_followed
    assert (x.grad is not None, layer.weight.grad is not None) == (is_followed, not is_frozen)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_has_the_numbers_of_torchao(recipe: str) -> None:
    config: Any = layer_of(recipe).config
    found = []
    for layer in (layer_of(recipe), Float8Linear.from_float(layer_of(recipe), config)):
        torch.manual_seed(1)
        x = torch.randn(2, 5, 32, dtype=torch.bfloat16, requires_grad=True)
        layer.bfloat16()
        with autocast(enabled=type(layer) is not Float8Linear):
            output = layer(x)
        (output * torch.randn(2, 5, 48)).sum().backward()
        found.append((output, x.grad, layer.weight.grad, layer.bias.grad))
    for own, other in zip(*found, strict=True):
        assert own is not None and other is not None and torch.equal(own, other)
