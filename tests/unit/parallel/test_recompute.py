"""Recomputation changes memory and nothing else."""

from __future__ import annotations

import collections
import copy
import gc
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import PlanError
from paceline.parallel.recompute import is_costly, recompute_blocks

Keep = Literal["inputs", "costly"]


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.dropout = nn.Dropout(dropout), dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        dropped = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropped)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_up(x)))))


def made(dropout: float, keep: Keep | None) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(32, dropout) for _ in range(3)))
    if keep is not None:
        recompute_blocks(model, keep=keep)
    return model


def gradients(model: nn.Module, *, half: bool, times: int = 1) -> list[Tensor]:
    torch.manual_seed(2)
    x = torch.randn(2, 16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        for _ in range(times):
            x = model(x)
    x.float().square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("keep", ["inputs", "costly"])
def test_gradients_are_those_of_keeping_everything(keep: Keep, dropout: float, half: bool) -> None:
    oracle = gradients(made(dropout, None), half=half)
    found = gradients(made(dropout, keep), half=half)
    assert len(found) == len(oracle) and all(map(torch.equal, found, oracle))


@pytest.mark.parametrize("keep", ["inputs", "costly"])
def test_a_block_may_run_twice_under_one_autocast(keep: Keep) -> None:
    oracle = gradients(made(0.2, None), half=True, times=2)
    for gradient, expected in zip(gradients(made(0.2, keep), half=True, times=2), oracle, strict=True):
        # Weights in 16 bits are not shared by the two uses, so their gradients are summed in 32 bits.
        torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.thorough
def test_selective_keeps_less_than_all_and_more_than_the_inputs() -> None:
    all_of_it = _forward_bytes(made(0.1, None))
    selected = _forward_bytes(made(0.1, "costly"))
    inputs = _forward_bytes(made(0.1, "inputs"))
    assert inputs < 0.5 * selected
    assert selected < 0.7 * all_of_it


def _forward_bytes(model: nn.Module) -> int:
    """Bytes that a forward has allocated and not freed: what its backward needs."""
    x = torch.randn(2, 16, 32)
    gc.collect()
    gc.disable()  # what was made before must not be freed in between
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss = model(x).square().mean()
        loss.detach_()
        return sum(event.self_cpu_memory_usage for event in seen.key_averages())
    finally:
        gc.enable()


def test_products_are_not_run_again_and_norms_are() -> None:
    ran = {keep: _backward_calls(made(0.0, keep)) for keep in ("inputs", "costly")}
    plain = _backward_calls(made(0.0, None))
    assert plain["native_layer_norm"] == 0 and ran["costly"]["native_layer_norm"] == 6
    assert ran["costly"]["mm"] == plain["mm"] and ran["costly"]["addmm"] == 0
    assert ran["inputs"]["addmm"] > 0
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert ran["costly"][attention] == 0 and ran["inputs"][attention] == 3


class Calls(TorchDispatchMode):
    """Counts the operations that are really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def _backward_calls(model: nn.Module) -> collections.Counter[str]:
    loss = model(torch.randn(2, 16, 32)).square().mean()
    with Calls() as calls:
        loss.backward()
    return calls.counts


def test_attention_that_drops_out_itself_is_not_kept() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    q: Any = torch.zeros(1)
    assert is_costly(attention, (q, q, q), {})
    assert is_costly(attention, (q, q, q, 0.0), {})
    assert not is_costly(attention, (q, q, q, 0.1), {})
    assert not is_costly(attention, (q, q, q), {"dropout_p": 0.1})


def test_collectives_are_kept_and_elementwise_work_is_not() -> None:
    assert is_costly(torch.ops._c10d_functional.all_reduce.default, (), {})
    assert is_costly(torch.ops.aten.convolution.default, (), {})
    assert not is_costly(torch.ops.aten.gelu.default, (), {})
    assert not is_costly(torch.ops.aten._to_copy.default, (), {})


@pytest.mark.parametrize(("keep", "word"), [("inputs", "blocks"), ("costly", "selective")])
def test_a_model_without_blocks_is_refused_in_the_plans_words(keep: Keep, word: str) -> None:
    with pytest.raises(PlanError, match=f"recompute='{word}'.*found no repeated blocks in Linear"):
        recompute_blocks(nn.Linear(2, 2), keep=keep)


def test_a_copy_of_a_model_recomputes_with_its_own_weights() -> None:
    model = made(0.0, "costly")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    expected = made(0.0, None)
    expected.load_state_dict(copied.state_dict())
    assert all(map(torch.equal, gradients(copied, half=False), gradients(expected, half=False)))
