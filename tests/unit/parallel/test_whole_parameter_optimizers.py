"""What large batches are trained with: optimizers that need whole parameters are known by trying them; rates scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytorch_optimizer import LARS, DAdaptAdam, Lamb, Prodigy

import paceline
from paceline.parallel.check.optimizer_requirements import needs_all_parameters, needs_whole_parameters


def made(kind: Any, **fields: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(4))], **{"lr": 0.1, **fields})


BY_NUMBER = [
    made(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    made(torch.optim.AdamW, amsgrad=True),
    made(torch.optim.AdamW, fused=True),
    made(torch.optim.Adam, foreach=True),
    made(torch.optim.RMSprop, centered=True, momentum=0.9),
    made(torch.optim.NAdam),
    made(torch.optim.Adagrad),
]
AS_A_WHOLE = [made(LARS), made(Lamb), made(torch.optim.Adafactor), made(torch.optim.LBFGS)]
ALL_TOGETHER = [made(Lamb, pre_norm=True), made(Prodigy), made(DAdaptAdam), made(torch.optim.LBFGS)]


@pytest.mark.parametrize("optimizer", BY_NUMBER, ids=lambda one: type(one).__name__)
def test_optimizers_that_treat_each_number_by_itself_need_no_whole_parameters(optimizer: torch.optim.Optimizer) -> None:
    assert not needs_whole_parameters(optimizer)


@pytest.mark.parametrize("optimizer", AS_A_WHOLE, ids=lambda one: type(one).__name__)
def test_those_that_look_at_norms_rows_or_all_at_once_do(optimizer: torch.optim.Optimizer) -> None:
    assert needs_whole_parameters(optimizer)


@pytest.mark.parametrize("optimizer", [*BY_NUMBER, *AS_A_WHOLE[:3]], ids=lambda one: type(one).__name__)
def test_optimizers_that_look_at_one_parameter_at_a_time_do_not_need_all_of_them(
    optimizer: torch.optim.Optimizer,
) -> None:
    assert not needs_all_parameters(optimizer)


@pytest.mark.parametrize("optimizer", ALL_TOGETHER, ids=lambda one: type(one).__name__)
def test_those_that_look_at_the_norm_of_all_or_at_how_far_all_have_come_do(optimizer: torch.optim.Optimizer) -> None:
    assert needs_all_parameters(optimizer)


def test_one_that_cannot_step_in_a_trial_is_right_where_parameters_are_whole_and_not_shown_to_be_on_halves() -> None:
    optimizer = made(torch.optim.SparseAdam)
    assert not needs_all_parameters(optimizer) and needs_whole_parameters(optimizer)


def test_one_that_is_set_up_for_a_gpu_is_tried_as_well() -> None:
    optimizer = made(torch.optim.AdamW, capturable=True)
    assert not needs_all_parameters(optimizer) and not needs_whole_parameters(optimizer)
    assert optimizer.param_groups[0]["capturable"]


def test_one_that_has_another_in_it_is_not_tried() -> None:
    outer, inner = made(torch.optim.SGD), made(torch.optim.AdamW)
    outer.__dict__["inner"] = inner
    assert needs_whole_parameters(outer) and not needs_all_parameters(outer) and not inner.state


def test_trying_one_changes_nothing_of_it_and_of_random_numbers() -> None:
    optimizer, calls = made(torch.optim.AdamW), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    before, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    values = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    needs_whole_parameters(optimizer)
    needs_all_parameters(optimizer)
    assert optimizer.state_dict() == before and not optimizer.state and not calls
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(*pair) for pair in zip(values, optimizer.param_groups[0]["params"], strict=True))


def test_trying_one_that_has_trained_leaves_its_estimates_alone() -> None:
    optimizer = made(Prodigy)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    assert needs_all_parameters(optimizer) and optimizer.state_dict()["param_groups"] == before


def test_a_rate_of_nought_before_a_warm_up_hides_nothing() -> None:
    optimizer = made(LARS)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0 and needs_whole_parameters(optimizer)


def test_rates_scale_by_the_rule_that_is_named_and_by_no_other() -> None:
    assert paceline.scaled_lr(0.1, batch=1024, reference_batch=256, rule="linear") == pytest.approx(0.4)
    assert paceline.scaled_lr(3e-4, batch=64, reference_batch=256, rule="sqrt") == pytest.approx(1.5e-4)
    rule: Any = "cubic"
    with pytest.raises(ValueError, match=r"'linear' .SGD. and 'sqrt'"):
        paceline.scaled_lr(0.1, batch=2, reference_batch=1, rule=rule)
    with pytest.raises(ValueError, match="reference_batch=0"):
        paceline.scaled_lr(0.1, batch=2, reference_batch=0, rule="linear")
    with pytest.raises(ValueError, match="from 0 on"):
        paceline.scaled_lr(float("nan"), batch=2, reference_batch=1, rule="linear")
