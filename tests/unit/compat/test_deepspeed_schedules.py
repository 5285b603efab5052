"""DeepSpeed's learning rate schedules: their formulas at single steps, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.compat.deepspeed.optimizers import make_schedule
from paceline.compat.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from paceline.compat.deepspeed_files.schedule_names import OPTIONS, choose_schedule
from paceline.errors import PlanError


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule: Any, count: int) -> list[float]:
    found = [schedule.get_last_lr()[0]]
    for _ in range(count):
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    return found


def test_warm_up_by_logarithm_and_by_line() -> None:
    found = rates(WarmupLR(optimizer(), 0.0, 1.0, warmup_num_steps=4), 6)
    assert found == pytest.approx([0, 0, 0.5, math.log(3) / math.log(4), 1, 1, 1])
    found = rates(WarmupLR(optimizer(), 0.2, 1.0, warmup_num_steps=4, warmup_type="linear"), 6)
    assert found == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.8, 1, 1])


def test_the_largest_rate_is_by_default_the_optimizers() -> None:
    assert rates(WarmupLR(optimizer(0.5), warmup_num_steps=2), 4)[-1] == 0.5


def test_decay_in_a_line_after_the_warm_up() -> None:
    found = rates(WarmupDecayLR(optimizer(), 6, 0.0, 1.0, warmup_num_steps=2, warmup_type="linear"), 9)
    assert found == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0])


def test_decay_along_a_cosine() -> None:
    schedule = WarmupCosineLR(optimizer(2.0), 6, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear")
    found = rates(schedule, 8)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
    assert found == pytest.approx([0, 0, 1.0, *(2 * one for one in cosine), 0.2, 0.2])


def test_a_range_test_grows_without_end() -> None:
    assert rates(LRRangeTest(optimizer(), 0.1, 2, 1.0), 4) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])
    assert rates(LRRangeTest(optimizer(), 0.1, 2, 1.0, True), 4) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def test_one_cycle_goes_up_and_down_then_decays_and_momentum_goes_the_other_way() -> None:
    held = optimizer()
    schedule = OneCycle(held, 0.1, 0.5, 1.0, cycle_first_step_size=2, cycle_second_step_size=2, decay_step_size=1)
    assert held.param_groups[0]["betas"] == (0.8, 0.99)
    moms: list[float] = []
    found = [schedule.get_last_lr()[0]]
    for _ in range(6):
        schedule.step()
        found.append(schedule.get_last_lr()[0])
        moms.append(held.param_groups[0]["betas"][0])
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1, 0.1 / 2, 0.1 / 3])
    assert moms == pytest.approx([0.85, 0.8, 0.85, 0.9, 0.9, 0.9])


def test_a_schedule_goes_on_from_its_state() -> None:
    first = WarmupDecayLR(optimizer(), 10, 0.0, 1.0, warmup_num_steps=3)
    rates(first, 5)
    second = WarmupDecayLR(optimizer(), 10, 0.0, 1.0, warmup_num_steps=3)
    second.load_state_dict(first.state_dict())
    first.step()
    second.step()
    assert first.get_last_lr() == second.get_last_lr()


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("WarmupLr", {}, "did you mean WarmupLR"),
        ("Warm", {}, "must be one of LRRangeTest"),
        ("WarmupLR", {"warmup_steps": 3}, "WarmupLR has no such option, did you mean warmup_num_steps"),
    ],
)
def test_unknown_schedules_and_options_are_refused(kind: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=f"(?i){text}"):
        choose_schedule(kind, params)


@pytest.mark.parametrize("params", [{"warmup_num_steps": 0}, {"warmup_type": "cubic"}, {"warmup_min_lr": [0.1, 0.2]}])
def test_values_out_of_range_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="WarmupLR refuses"):
        make_schedule(choose_schedule("WarmupLR", params), optimizer())


def test_all_options_are_parameters_of_the_schedules() -> None:
    import inspect

    from paceline.compat.deepspeed import schedules

    for kind, options in OPTIONS.items():
        parameters = inspect.signature(getattr(schedules, kind)).parameters
        assert {one.rstrip("*") for one in options} == set(parameters) - {"optimizer", "last_batch_iteration"}
        assert {one.rstrip("*") for one in options if one.endswith("*")} == {
            name for name, one in parameters.items() if one.default is one.empty and name != "optimizer"
        }


def test_a_class_of_torch_is_a_schedule_too() -> None:
    assert rates(make_schedule(choose_schedule("StepLR", {"step_size": 1, "gamma": 0.5}), optimizer()), 2) == [
        0.5,
        0.25,
        0.125,
    ]
