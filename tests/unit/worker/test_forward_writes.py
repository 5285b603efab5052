"""The watch of parameters during forward, where workers come and go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import PlanError
from paceline.worker.step.forward_writes import ForwardWrites


def test_a_worker_that_others_have_joined_is_watched_from_then_on() -> None:
    model, is_alone = nn.Linear(2, 2), True
    writes = ForwardWrites(is_alone=lambda: is_alone)
    named = [*model.named_parameters()]

    def a_pass() -> None:
        writes.begin(named, model.modules())
        with torch.no_grad():
            model.weight.mul_(0.5)
        writes.check(modules=model.modules())
        writes.end()

    a_pass()
    is_alone = False
    with pytest.raises(PlanError, match="parameter weight was changed"):
        a_pass()
    writes.end()
