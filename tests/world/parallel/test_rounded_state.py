"""Optimizer state in bf16: the same steps under any layout, checkpoints to the bit, half the bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import quick
from forked import WorkersFailed, World
from layout_runs import RESUME, ROWS, Net, Text, assert_same, beside, next_word, workers_of
from paceline.checkpoint.reader import open_checkpoint
from paceline.plan import Compute, Layout, Plan

ROUNDED = Compute(state="bf16")


def trained(worker: Any, epochs: int = 2, kind: str = "adamw") -> dict[str, Any]:
    torch.manual_seed(3)
    model = worker.prepare(Net(0.0), buffers={"seen": "mean"})
    if kind == "muon":
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "words" not in name]
        optim = worker.prepare(torch.optim.Muon(matrices, lr=0.02))
    else:
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, next_word, clip_norm=0.5)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(ROWS), epochs=epochs):
        loss = float(step(batch))
        losses[worker.step] = loss
    kinds = {str(v.dtype) for values in optim.state.values() for v in values.values() if torch.is_tensor(v) and v.dim()}
    return {"losses": losses, "kinds": kinds}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def found(kind: str, compute: Compute = ROUNDED, epochs: int = 2) -> dict[str, Any]:
        world, train = World(tmp_path_factory.mktemp("alone")), functools.partial(trained, kind=kind, epochs=epochs)
        return world.one_process(train, Plan(batch=RESUME, compute=compute), save_at_end=False)

    return found


CASES = [
    ("adamw", Layout(shard=2, tensor=2)),
    ("adamw", Layout(replicas=2)),
    quick.further("adamw", Layout(shard=3)),
    quick.further("adamw", Layout(stages=2)),
    quick.further("adamw", Layout(shard=2, zero=1)),
    quick.further("muon", Layout(shard=2)),
    quick.further("muon", Layout(tensor=2)),
]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_numbers_are_rounded_as_in_one_process(world: World, alone: Any, kind: str, layout: Layout) -> None:
    """The order of sums differs in the last digit, so one number in ten thousand may be rounded to the other side."""
    train = functools.partial(trained, kind=kind)
    found = world(train, workers_of(layout), Plan(layout=layout, batch=RESUME, compute=ROUNDED), save_at_end=False)
    oracle = alone(kind)
    for one in found:
        assert one["kinds"] == {"torch.bfloat16"}
    assert_same([{"losses": one["losses"]} for one in found], {"losses": oracle["losses"]}, tolerance=2e-3)
    exact = alone(kind, Compute())["losses"]
    assert oracle["losses"] != exact, "state is rounded"
    assert oracle["losses"] == pytest.approx(exact, rel=0.05)


def test_a_checkpoint_has_the_state_in_bf16_and_a_run_goes_on_to_the_bit(world: World, tmp_path: Path) -> None:
    plan = Plan(layout=Layout(shard=2), batch=RESUME, compute=ROUNDED)
    whole = beside(tmp_path)(trained, 2, plan)[0]["losses"]
    first = world(trained, 2, plan, max_steps=3)[0]["losses"]
    checkpoint = open_checkpoint(max((world.run_dir / "checkpoints").iterdir()))
    names = [name for name in checkpoint.names if name.startswith("optimizer.state.") and name.endswith("exp_avg_sq")]
    assert names and {checkpoint.dtype(name) for name in names} == {torch.bfloat16}
    rest = world(trained, 2, plan)[0]["losses"]
    assert {**first, **rest} == whole


@pytest.mark.further
def test_a_run_goes_on_with_and_without_rounding(world: World) -> None:
    for until, compute, kind in [(2, Compute(), "float32"), (4, ROUNDED, "bfloat16"), (6, Compute(), "float32")]:
        found = world(trained, 2, Plan(layout=Layout(shard=2), batch=RESUME, compute=compute), max_steps=until)
        assert found[0]["kinds"] == {f"torch.{kind}"}


def with_prodigy(worker: Any) -> None:
    from pytorch_optimizer import Prodigy

    worker.prepare(Prodigy(worker.prepare(Net(0.0)).parameters()))


def test_who_needs_all_parameters_at_once_is_refused(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"Prodigy.*with Compute\(state='bf16'\) the state of some is rounded"):
        world(with_prodigy, 1, Plan(compute=ROUNDED), save_at_end=False)
