"""What large batches are trained with: optimizers that need whole parameters are known by trying them; rates scale."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import (
    LARS,
    MADGRAD,
    SGDP,
    AdaFactor,
    AdaMuon,
    AdaShift,
    DAdaptAdam,
    Lamb,
    Lookahead,
    Prodigy,
    QHAdam,
    ScalableShampoo,
)

import paceline
from paceline.checkpoint.state_tree import freeze
from paceline.parallel.check.optimizer_requirements import BY_NUMBER as KNOWN
from paceline.parallel.check.optimizer_requirements import needs_all_parameters, needs_of, needs_whole_parameters
from paceline.parallel.check.optimizer_state import KeptState, kept_state

pytestmark = pytest.mark.thorough  # pytorch_optimizer takes seconds to import
ROOT = Path(__file__).parents[3]


def made(kind: Any, **fields: Any) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(4))], **{"lr": 0.1, **fields})


class Small(torch.optim.Optimizer):
    """SGD that changes its gradients by `change`."""

    def __init__(self, parameters: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(parameters, {"lr": lr, **options})

    def change(self, gradient: torch.Tensor, state: Any, options: Any) -> torch.Tensor:
        return gradient

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for options in self.param_groups:
            for parameter in options["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    parameter -= options["lr"] * self.change(parameter.grad, state, options)


class LateNorm(Small):
    """Divides by a norm after 20,000 steps."""

    def __init__(self, parameters: Any, lr: float = 0.1, *, is_global: bool = False) -> None:
        super().__init__(parameters, lr, starts_at=20_000, is_global=is_global)

    def change(self, gradient: torch.Tensor, state: Any, options: Any) -> torch.Tensor:
        if state["step"] < options["starts_at"]:
            return gradient
        held = [one.grad for one in options["params"]] if options["is_global"] else [gradient]
        return gradient / torch.stack([one.norm() for one in held]).norm()


class Noisy(Small):
    def change(self, gradient: torch.Tensor, state: Any, options: Any) -> torch.Tensor:
        return gradient + torch.randn_like(gradient)


class Outside(Small):
    num_steps = 0

    def change(self, gradient: torch.Tensor, state: Any, options: Any) -> torch.Tensor:
        self.num_steps += 1
        return gradient / self.num_steps


BY_NUMBER = [
    made(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    made(torch.optim.AdamW, amsgrad=True),
    made(torch.optim.Adam, fused=True),
    made(torch.optim.RMSprop, centered=True, foreach=True),
]
AS_A_WHOLE = [made(LARS), made(Lamb), made(torch.optim.Adafactor), made(torch.optim.LBFGS)]
ALL_TOGETHER = [made(Lamb, pre_norm=True), made(Prodigy), made(DAdaptAdam), made(torch.optim.LBFGS)]


@pytest.mark.parametrize("optimizer", BY_NUMBER, ids=lambda one: type(one).__name__)
def test_optimizers_that_treat_each_number_by_itself_need_no_whole_parameters(optimizer: torch.optim.Optimizer) -> None:
    assert not needs_whole_parameters(optimizer)


def test_those_that_are_prepared_without_a_trial_are_among_them() -> None:
    assert {type(one) for one in BY_NUMBER} >= set(KNOWN)


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


def test_one_that_has_another_in_it_is_tried_with_a_copy_of_that() -> None:
    for inner, is_whole in ((made(torch.optim.SGD, momentum=0.9), False), (made(LARS), True)):
        outer = Lookahead(inner)
        before = copy.deepcopy(inner.state_dict())
        assert needs_whole_parameters(outer) == is_whole
        assert inner.state_dict() == before


@pytest.mark.parametrize(
    "optimizer",
    [made(SGDP), made(AdaShift), made(AdaFactor, warmup_init=True), made(ScalableShampoo), made(LateNorm)],
    ids=lambda one: type(one).__name__,
)
def test_parts_that_act_rarely_late_or_a_little_are_reached(optimizer: torch.optim.Optimizer) -> None:
    assert needs_whole_parameters(optimizer)


def test_a_part_that_acts_late_on_all_parameters_is_reached() -> None:
    assert needs_all_parameters(made(LateNorm, is_global=True)) and not needs_all_parameters(made(LateNorm))


def test_only_groups_with_the_parameters_in_question_are_tried() -> None:
    vector, matrix = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(3, 5))
    muon: Any = AdaMuon([{"params": [vector], "use_muon": False}, {"params": [matrix], "use_muon": True}])
    assert needs_whole_parameters(muon) and not needs_whole_parameters(muon, [vector])


def test_one_that_draws_random_numbers_would_draw_others_on_each_worker() -> None:
    assert needs_of(made(Noisy)).draws and needs_whole_parameters(made(Noisy))
    assert not needs_all_parameters(made(Noisy))


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (made(QHAdam), KeptState()),  # it has tensors of one number
        (made(Lamb), KeptState()),
        (made(AdaShift), KeptState(refused="cannot store state.grad_queue: <collections.deque>")),
        (made(MADGRAD), KeptState(refused="it keeps k in its state, which belongs to no parameter")),
        (made(Outside), KeptState(is_incomplete=True)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_an_optimizer_keeps_is_known_before_it_trains(
    optimizer: torch.optim.Optimizer, expected: KeptState
) -> None:
    assert kept_state(optimizer, freeze) == expected


def test_state_in_shapes_of_its_own_is_named() -> None:
    kept = kept_state(made(torch.optim.Adafactor), freeze)
    assert kept.odd_tensors == ("row_var [6, 1] for [6, 5]", "col_var [1, 5] for [6, 5]")


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


def test_the_table_in_the_docs_says_the_same_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    program: Any = importlib.import_module("optimizers")
    page = (ROOT / "docs" / "reference" / "optimizers.md").read_text(encoding="utf-8").splitlines()
    rows = list(program.table(["AdamP", "torch.optim.SGD", "AdaShift"]))
    assert len(rows) == 5 and all(row in page for row in rows)
