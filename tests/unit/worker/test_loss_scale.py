"""The loss scale of fp16 is torch's GradScaler, with DeepSpeed's hysteresis, and it ends at 1."""

from __future__ import annotations

import math
import random

import pytest
import torch

from paceline.plan import Compute
from paceline.worker.step.loss_scale import LossScale


def scale_of(**options: object) -> LossScale:
    return LossScale(Compute(precision="fp16", **options))  # type: ignore[arg-type]  # fields of Compute


def trace(scale: LossScale, passes: str) -> list[float]:
    """The scale after each pass: "." was right, "x" overflowed."""
    found = []
    for one in passes:
        scale.settled(1.0, finite=one == ".")
        found.append(scale.value)
    return found


@pytest.mark.parametrize("window", [1, 3, 7])
def test_it_is_torchs_grad_scaler(window: int) -> None:
    draw = random.Random(window)
    passes = "".join(draw.choices(".x", weights=[window, 1], k=200))
    weight = torch.nn.Parameter(torch.zeros(1))
    optim = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=window)
    expected = []
    for one in passes:
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full_like(weight, 1.0 if one == "." else math.inf)
        scaler.step(optim)
        scaler.update()
        expected.append(scaler.get_scale())
    assert min(expected) > 1.0, "torch's has no least"
    assert trace(scale_of(loss_scale_start=2.0**30, loss_scale_window=window), passes) == expected


def test_with_hysteresis_one_overflow_is_forgiven_until_the_scale_doubles_again() -> None:
    """The rule of DeepSpeed's DynamicLossScaler with hysteresis 2, which is not refilled by good steps."""
    scale = scale_of(loss_scale_start=64, loss_scale_window=2, loss_scale_hysteresis=2)
    assert trace(scale, "x.xx..xx") == [64, 64, 32, 16, 16, 32, 32, 16]


def test_it_is_halved_down_to_one_and_overflows_there_are_no_longer_the_scales() -> None:
    scale = scale_of(loss_scale_start=4)
    assert scale.is_too_large(2.0, finite=False) and not scale.is_too_large(2.0, finite=True)
    assert trace(scale, "xxxx") == [2, 1, 1, 1]
    assert not scale.is_too_large(2.0, finite=False)
    assert scale.num_overflows == 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_says_nothing_about_the_scale(loss: float) -> None:
    scale = scale_of(loss_scale_start=64, loss_scale_window=2)
    assert not scale.is_too_large(loss, finite=False)
    scale.settled(1.0, finite=True)
    scale.settled(loss, finite=False)
    scale.settled(1.0, finite=True)
    assert (scale.value, scale.num_overflows) == (128, 0)


def test_further_passes_over_a_batch_are_no_steps() -> None:
    scale = scale_of(loss_scale_start=64, loss_scale_window=2)
    for is_first in (True, False, False):
        scale.settled(1.0, finite=True, is_first=is_first)
    assert scale.value == 64
    scale.settled(1.0, finite=False, is_first=False)
    assert scale.value == 32, "but they overflow"


def test_a_scale_that_stays_and_none_at_all() -> None:
    fixed = scale_of(loss_scale=1000)
    assert trace(fixed, "x" * 3 + "." * 3000)[-1] == 1000
    assert not fixed.is_too_large(2.0, finite=False) and fixed.num_overflows == 3
    none = LossScale(Compute(precision="bf16"))
    assert not none.is_used and trace(none, ".x")[-1] == 1.0 and none.num_overflows == 0


def test_the_state_goes_on_where_it_was() -> None:
    options = {"loss_scale_start": 2.0**20, "loss_scale_window": 5, "loss_scale_hysteresis": 2}
    passes = "..x..x....x.....x."
    first = scale_of(**options)
    whole = trace(first, passes)
    for stop in range(len(passes)):
        first, second = scale_of(**options), scale_of(**options)
        before = trace(first, passes[:stop])
        second.load_state_dict(first.state_dict())
        assert before + trace(second, passes[stop:]) == whole, stop
    fixed = scale_of(loss_scale=8)
    fixed.load_state_dict(first.state_dict())
    assert (fixed.value, fixed.num_overflows) == (8, first.num_overflows), "the plan's scale counts"
