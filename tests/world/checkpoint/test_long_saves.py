"""A worker that writes or verifies a checkpoint for long keeps nobody waiting in one transfer: others hear of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.checkpoint import async_writer as writer_module
from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.worker.state import background_call, checkpoint_saving, resumed_state

LIMIT_S = 30.0
ENOUGH = 3  # times that the others hear of it before it is done


def train(worker: Any) -> list[int]:
    model = worker.prepare(nn.Linear(4, 1))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.01)), nn.functional.mse_loss)
    data = TensorDataset(torch.ones(128, 4), torch.ones(128, 1))
    steps: list[int] = []
    for batch in worker.batches(data):
        step(batch)
        steps.append(worker.step)
    return steps


def held_until(told: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which begins when somebody has left a word."""

    def held(*arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not told.exists():
            assert time.monotonic() < deadline, "the others wait for it, and hear nothing"
            time.sleep(0.005)
        return function(*arguments, **options)

    return held


def telling(told: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which leaves a word when a worker that neither writes nor reads has called it often enough."""
    calls: list[int] = []

    def counted(group: Any, *arguments: Any, **options: Any) -> Any:
        value = function(group, *arguments, **options)
        calls.append(group.index)
        if calls.count(1) == ENOUGH:
            told.touch()
        return value

    return counted


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_call, "POLL_S", 0.01)


@pytest.mark.parametrize("job", [{"max_steps": 3}, {}, {"save_every": 1, "max_steps": 2}], ids=["stop", "end", "next"])
def test_a_save_that_takes_long_is_no_hang(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: dict[str, Any]
) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(writer_module, "_fill", held_until(told, writer_module._fill))
    monkeypatch.setattr(checkpoint_saving, "total", telling(told, checkpoint_saving.total))
    first, second = world(train, 2, **job)
    assert first == second == list(range(1, job.get("max_steps", 4) + 1))
    assert (world.run_dir / "checkpoints" / f"step_{first[-1]:08d}").exists()


def test_a_checkpoint_that_is_verified_for_long_is_no_hang(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world(train, 2, max_steps=2)
    told = tmp_path / "told"
    monkeypatch.setattr(resumed_state, "find", held_until(told, resumed_state.find))
    monkeypatch.setattr(ElasticGroup, "broadcast_object", telling(told, ElasticGroup.broadcast_object))
    assert world(train, 2)[0] == [3, 4]


def test_what_goes_wrong_beside_the_others_is_raised(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the thread")

    monkeypatch.setattr(resumed_state, "find", wrong)
    with pytest.raises(WorkersFailed, match="ZeroDivisionError: in the thread"):
        world(train, 2)
