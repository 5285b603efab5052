"""Gradients that engines have made in turn, on their way into the run's own pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.compat.deepspeed.shared_steps import _Made, _WithGradients


def test_gradients_are_handed_on_without_a_copy() -> None:
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    made = _Made([torch.full((2, 3), float(number)) for number in (4, 6)], 0.5)
    places = [one.data_ptr() for one in made.gradients]
    value: Any = _WithGradients.apply(torch.ones((), requires_grad=True), made, *parameters)
    value.backward()
    assert [one.grad.data_ptr() for one in parameters if one.grad is not None] == places
    assert [one.grad.unique().tolist() for one in parameters if one.grad is not None] == [[2.0], [3.0]]
    assert made.gradients == []
