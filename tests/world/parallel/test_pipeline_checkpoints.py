"""Checkpoints of replicas in stages: every worker writes its own, and any other layout goes on from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked import World
from paceline.checkpoint.reader import open_checkpoint
from paceline.plan import Layout, Plan
from staged_net import EXACT, RESUME, WIDTH, WORDS, Net, Text, beside, mean_loss, train, workers_of


def test_a_checkpoint_of_any_layout_goes_on_under_any_other(world: World, tmp_path: Path) -> None:
    whole = beside(tmp_path).one_process(train, Plan(batch=RESUME, compute=EXACT))
    layouts = [
        Layout(replicas=4),
        Layout(stages=2),
        Layout(replicas=2, stages=2),
        Layout(replicas=3),
        Layout(stages=2, schedule="interleaved", stages_per_worker=2),
        Layout(tensor=2),
        Layout(stages=4, schedule="zero-bubble"),
        Layout(),
    ]
    for number, layout in enumerate(layouts):
        plan = Plan(layout=layout, batch=RESUME, compute=EXACT)
        expected = {step: whole[step] for step in (2 * number + 1, 2 * number + 2)}
        for found in world(train, workers_of(layout), plan, max_steps=2 * number + 2):
            assert found == pytest.approx(expected, rel=1e-9), layout


def test_each_worker_writes_its_own_stages(world: World, tmp_path: Path) -> None:
    one = beside(tmp_path)
    world(train, 2, Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT), max_steps=4)
    one(train, 1, Plan(batch=RESUME, compute=EXACT), max_steps=4)
    (path,), (other,) = ((each.run_dir / "checkpoints").iterdir() for each in (world, one))
    found, expected = open_checkpoint(path).load(), open_checkpoint(other).load()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    sizes = [sum(file.stat().st_size for file in path.glob(f"__{part}_*.distcp")) for part in (0, 1)]
    assert min(sizes) > 0.25 * sum(sizes)


class Counting(torch.optim.SGD):
    """Keeps a plain number for each parameter, which is no tensor."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["times"] = self.state[p].get("times", 0) + 1
        return result


def test_plain_optimizer_state_of_all_stages_is_saved_and_comes_back(world: World) -> None:
    def work(worker: Any) -> dict[str, int]:
        torch.manual_seed(3)
        model = worker.prepare(Net())
        optim = worker.prepare(Counting(model.parameters(), lr=0.01))
        step = worker.stepper(model, optim, mean_loss)
        for batch in worker.batches(Text(), epochs=4):
            step(batch)
        return {name: optim.state[p]["times"] for name, p in model.named_parameters() if "times" in optim.state[p]}

    world(work, 2, Plan(layout=Layout(stages=2), batch=RESUME), max_steps=3)
    (found,) = world(work, 1, Plan(batch=RESUME), max_steps=5)
    assert set(found.values()) == {5} and {"words.weight", "blocks.3.qkv.weight"} <= found.keys()


def steps_of(worker: Any, net: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> dict[int, float]:
    """Steps of two epochs, as far as this start comes, and their losses."""
    model = worker.prepare(net)
    step = worker.stepper(model, worker.prepare(kind(model.parameters(), lr=0.05)), mean_loss)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(), epochs=2):
        loss = float(step(batch))
        losses[worker.step] = loss
    return losses


def assert_it_goes_on(world: World, tmp_path: Path, work: Callable[[Any], dict[int, float]]) -> None:
    """From a checkpoint of two stages, as two stages, and then as one process."""
    whole = beside(tmp_path).one_process(work, Plan(batch=RESUME, compute=EXACT))
    world(work, 2, Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT), max_steps=2)
    for found in world(work, 2, Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT), max_steps=4):
        assert found == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-9)
    (found,) = world(work, 1, Plan(batch=RESUME, compute=EXACT))
    assert found == pytest.approx({step: whole[step] for step in range(5, 9)}, rel=1e-9)


def test_optimizers_that_make_their_state_at_once_are_saved_too(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> dict[int, float]:
        torch.manual_seed(3)
        return steps_of(worker, Net(), torch.optim.Adagrad)

    assert_it_goes_on(world, tmp_path, work)


class Scores(nn.Module):
    """A head whose bias has two names, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WORDS)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x)


class Named(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Scores()


@pytest.mark.further
def test_two_names_of_a_tensor_of_the_last_stage_both_come_back(world: World, tmp_path: Path) -> None:
    def work(worker: Any) -> dict[int, float]:
        torch.manual_seed(3)
        return steps_of(worker, Named(), torch.optim.AdamW)

    assert_it_goes_on(world, tmp_path, work)
