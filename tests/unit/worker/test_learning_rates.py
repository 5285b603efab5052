"""Which learning rates of a run's optimizers are recorded, and under which names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.worker.loop.learning_rates import LearningRates


def optimizer(*rates: Any) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def test_groups_of_equal_rates_are_one_and_another_keeps_its_name() -> None:
    rates, one = LearningRates(), optimizer(0.1, 0.1, 0.1)
    assert rates.now([one]) == {"lr": 0.1}
    one.param_groups[2]["lr"] = 0.3
    assert rates.now([one]) == {"lr": 0.1, "lr/2": 0.3}
    one.param_groups[2]["lr"] = 0.1
    assert rates.now([one]) == {"lr": 0.1, "lr/2": 0.1}, "a curve goes on"


def test_groups_are_counted_over_all_optimizers_and_bounded() -> None:
    assert LearningRates().now([optimizer(0.1), optimizer(0.1, 0.2)]) == {"lr": 0.1, "lr/2": 0.2}
    many = LearningRates().now([optimizer(*(1.0 / k for k in range(1, 100)))])
    assert len(many) == 8 and many["lr/7"] == 1 / 8
    assert LearningRates().now([]) == {}


def test_a_tensor_is_kept_as_it_was_and_a_rate_that_is_no_number_is_left_out() -> None:
    rate = torch.tensor(0.5)
    one = optimizer(rate)
    (kept,) = LearningRates().now([one]).values()
    rate.fill_(0.1)
    assert isinstance(kept, torch.Tensor) and float(kept) == 0.5
    one.param_groups[0]["lr"] = None
    assert LearningRates().now([one]) == {}
    equal = optimizer(torch.tensor(0.5), torch.tensor(0.5))
    assert list(LearningRates().now([equal])) == ["lr"]
