"""Linear layers in FP8, emulated: the same numbers under each layout, and checkpoints that know nothing of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quick
from forked import WorkersFailed, World
from layout_runs import HELD_OUT, RESUME, ROWS, Net, Text, assert_same, lines_of, next_word, workers_of
from paceline.checkpoint.reader import open_checkpoint
from paceline.parallel.float8_linear import use_float8
from paceline.plan import Compute, Layout, Plan

use_float8(
    nn.Linear(16, 16), recipe="rowwise", emulates=True
)  # what it imports takes seconds, once before workers fork
BF16 = Compute(precision="bf16")


def fp8(recipe: Any = "tensorwise", **fields: Any) -> Compute:
    return Compute(precision="fp8", fp8_recipe=recipe, fp8_emulate=True, **fields)


def trained(worker: Any, epochs: int = 2, clip_norm: float | None = 0.5) -> dict[str, Any]:
    torch.manual_seed(3)
    net = Net(0.0)
    layers = [net.blocks[0].qkv, net.blocks[0].up]
    model = worker.prepare(net, buffers={"seen": "mean"})
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    step = worker.stepper(model, optim, next_word, clip_norm=clip_norm)
    losses: dict[int, float] = {}
    for batch in worker.batches(Text(ROWS), epochs=epochs):
        loss = float(step(batch))
        losses[worker.step] = loss
    return {
        "losses": losses,
        "evaluated": worker.evaluate(model, Text(HELD_OUT), next_word)["loss"],
        "kinds": [type(one).__name__ for one in layers],
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def found(compute: Compute, clip_norm: float | None = 0.5) -> dict[str, Any]:
        world, program = World(tmp_path_factory.mktemp("alone")), functools.partial(trained, clip_norm=clip_norm)
        return world.one_process(program, Plan(batch=RESUME, compute=compute), save_at_end=False)

    return found


CASES = [
    ("tensorwise", Layout(shard=2)),
    quick.further("rowwise", Layout(stages=2)),
    quick.further("tensorwise", Layout(replicas=2)),
    quick.further("rowwise", Layout(shard=2, zero=1)),
    quick.further("rowwise", Layout(shard=3, zero=2)),
    quick.further("rowwise_with_gw_hp", Layout(shard=2, stages=2)),
    quick.further("tensorwise", Layout(stages=2, schedule="zero-bubble")),
]


@pytest.mark.parametrize(("recipe", "layout"), CASES, ids=str)
def test_each_layout_has_the_numbers_of_one_process(world: World, alone: Any, recipe: str, layout: Layout) -> None:
    """A scale follows the largest number of a micro-batch, which is the same on any number of workers."""
    plan = Plan(layout=layout, batch=RESUME, compute=fp8(recipe))
    # A norm that is summed in another order may differ in its last bit, and at last a weight is cast to another number.
    clip_norm = None if layout == Layout(shard=2, stages=2) else 0.5
    program = functools.partial(trained, clip_norm=clip_norm)
    found, oracle = world(program, workers_of(layout), plan, save_at_end=False), alone(fp8(recipe), clip_norm)
    assert oracle["kinds"] == ["AutocastFloat8Linear", "Linear"], "61 is no multiple of 16"
    for key in ("losses", "evaluated"):
        assert_same([{key: one[key]} for one in found], {key: oracle[key]}, tolerance=1e-5)
    exact = alone(BF16, clip_norm)["losses"]
    assert oracle["losses"] != pytest.approx(exact, rel=5e-4), "products are in 8 bits"
    assert oracle["losses"] == pytest.approx(exact, rel=0.05)


@pytest.mark.further
@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_a_recomputed_block_has_the_same_numbers(world: World, alone: Any, recompute: Any) -> None:
    plan = Plan(layout=Layout(shard=2), batch=RESUME, compute=fp8(recompute=recompute))
    found = world(trained, 2, plan, save_at_end=False)[0]
    assert found["losses"] == pytest.approx(alone(fp8())["losses"], rel=1e-5)


def test_checkpoints_go_on_in_bf16_and_back(world: World, alone: Any) -> None:
    in_8, in_16 = (Plan(layout=Layout(shard=2), batch=RESUME, compute=compute) for compute in (fp8(), BF16))
    first = world(trained, 2, in_8, max_steps=2)[0]["losses"]
    checkpoint = open_checkpoint(max((world.run_dir / "checkpoints").iterdir()))
    assert checkpoint.dtype("model.blocks.0.qkv.weight") == torch.float32
    assert not [name for name in checkpoint.names if "scale" in name or "config" in name]
    second = world(trained, 2, in_16, max_steps=4)[0]["losses"]
    last = world(trained, 2, in_8)[0]["losses"]
    assert [*first, *second, *last] == list(range(1, 7))
    assert first == pytest.approx({step: alone(fp8())["losses"][step] for step in first}, rel=1e-5)
    assert first | second | last == pytest.approx(alone(BF16)["losses"], rel=0.05)


def test_the_log_says_what_computes_in_fp8_and_what_does_not(world: World) -> None:
    world(functools.partial(trained, epochs=1), 1, Plan(batch=RESUME, compute=fp8(fp8_skip="*.1.*")), max_steps=1)
    text = "\n".join(str(line) for line in lines_of(world, 1, "events.jsonl"))
    assert "FP8 (tensorwise, emulated): 2 of 10 linear layers of Net" in text
    assert "sizes are no multiples of 16: blocks.0.up, blocks.0.down" in text
    assert "fp8_skip names them: blocks.1.qkv" in text


def test_a_device_without_fp8_is_refused_before_the_script_runs(world: World, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with pytest.raises(WorkersFailed) as caught:
        world(lambda _: mark.write_text("ran"), 1, Plan(compute=Compute(precision="fp8")))
    assert "computes on the CPU, which has no products in FP8" in str(caught.value)
    assert "fp8_emulate=True" in str(caught.value)
    assert not mark.exists()


def compiled(_: Any) -> list[tuple[Any, ...]]:
    """What a layer computes as written and compiled, without breaks of the graph: trained, and frozen."""
    found = []
    for is_frozen in (False, True):
        torch.manual_seed(0)
        layer, x = nn.Linear(32, 48).requires_grad_(not is_frozen), torch.randn(5, 32, requires_grad=True)
        use_float8(layer, recipe="rowwise", emulates=True)
        for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            x.grad = layer.weight.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                output = run(x)
            output.float().square().sum().backward()
            found.append((output.detach(), x.grad, layer.weight.grad))
    return found


def test_the_compiler_sees_the_casts_and_breaks_no_graph(world: World) -> None:
    (found,) = world(compiled, 1, Plan(), save_at_end=False)
    for written, again in (found[:2], found[2:]):
        torch.testing.assert_close(again, written, rtol=0, atol=0)
    assert [one[2] is None for one in found] == [False, False, True, True]
