"""The steps of a program's own loop are counted by what its optimizers do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.flight_recorder import FlightRecorder
from paceline.worker.loop.program_steps import ProgramSteps


class Log:
    """Notes what is counted, in place of the step log."""

    def __init__(self) -> None:
        self.step, self.is_counting = 0, False
        self.told: list[tuple[dict[str, float], float | None]] = []

    def count(self, rates: Mapping[str, Tensor | float], *, loss: float | None) -> None:
        self.step += 1
        self.told.append(({name: float(rate) for name, rate in rates.items()}, loss))


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def counted(log: Log) -> contextlib.AbstractContextManager[None]:
    steps: Any = ProgramSteps(log, FlightRecorder.unread())  # type: ignore[arg-type]  # all that it asks of it
    return steps.counting()


@pytest.mark.parametrize(
    ("order", "steps"),
    [("aaa", 3), ("ababab", 3), ("abab", 2), ("aaabbb", 6), ("ababb", 3), ("a", 1), ("", 0), ("aab", 3)],
)
def test_each_optimizer_steps_once_in_a_step(order: str, steps: int) -> None:
    log = Log()
    known = {"a": optimizer(0.1), "b": optimizer(0.2)}
    with counted(log):
        for name in order:
            known[name].step()
    assert log.step == steps
    assert not log.is_counting


def test_a_step_has_the_loss_on_which_backward_was_called_last() -> None:
    log = Log()
    own = optimizer(0.1)
    (weight,) = own.param_groups[0]["params"]
    with counted(log):
        for factor in (1.0, 2.0):
            (weight * 0.0 + 9.0).sum().backward()
            (weight * 0.0 + factor).sum().backward()
            own.step()
        own.step()  # without a loss
        torch.ones(2, requires_grad=True).backward(torch.ones(2))  # this is none
        own.step()
    assert log.told == [({"lr": 0.1}, 1.0), ({"lr": 0.1}, 2.0), ({"lr": 0.1}, None), ({"lr": 0.1}, None)]
    own.step()
    assert log.step == 4


def test_an_optimizer_within_another_one_is_a_part_of_its_step() -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.fails = inner, False
            super().__init__(inner.param_groups[0]["params"], {"lr": 3.0})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch has overloads
            if self.fails:
                raise ValueError("no")
            self.inner.step()

    log = Log()
    outer = Outer(optimizer(0.1))
    with counted(log):
        outer.step()
        outer.step()
        outer.fails = True
        with contextlib.suppress(ValueError):
            outer.step()
        outer.fails = False
        outer.step()
    assert [rates for rates, _ in log.told] == [{"lr": 3.0}] * 3


def test_an_error_leaves_torch_as_it_was_and_ends_no_step() -> None:
    log, own, before = Log(), optimizer(0.1), Tensor.backward
    with pytest.raises(ValueError, match="no"), counted(log):
        own.step()
        raise ValueError("no")
    assert log.step == 0  # the first step ends where the second begins
    assert Tensor.backward is before
