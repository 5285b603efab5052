"""The steps that a program's optimizer takes are counted, whichever way it steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline.compat.horovod as hvd
from paceline.compat.horovod import optimizer as optimizers
from paceline.compat.horovod import progress


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_each_step_counts_once(clips: bool, closure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_first", [])
    monkeypatch.setattr(progress, "_counted", 0)
    seconds: list[dict[str, float]] = []
    count = optimizers.step_done

    def step_done(optimizer: Any, **parts: float) -> None:
        seconds.append(parts)
        count(optimizer, **parts)

    monkeypatch.setattr(optimizers, "step_done", step_done)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    for step in range(1, 4):
        given = [compute] if closure else []
        if not closure:
            compute()
        if clips:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step(*given)
        else:
            optimizer.step(*given)
        assert progress.count() == step
    assert all(one["waited_s"] > 0 and one["stepped_s"] > 0 for one in seconds)
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.8**3))
