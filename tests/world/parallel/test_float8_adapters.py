"""LoRA on a base that computes in FP8: the numbers of one process, and adapters as they are written."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import quick
from forked import World
from layout_runs import assert_same, lines_of, workers_of
from paceline.plan import Batch, Compute, Layout, Plan
from tuned_models import WORDS, adapted, loss_of

pytest.importorskip("peft")
BATCH = Batch(size=8, micro=2)
FP8, BF16 = Compute(precision="fp8", fp8_emulate=True), Compute(precision="bf16")


def tuned(worker: Any) -> dict[str, Any]:
    model = worker.prepare(adapted(rank=16))
    trained = [one for one in model.parameters() if one.requires_grad]
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(trained, lr=0.02)), forward=loss_of)
    losses = [step(batch).item() for batch in worker.batches(TensorDataset(WORDS), epochs=2)]
    kinds = Counter(
        (type(one).__name__, "base_layer" in name, ".lora_" in name)
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear)
    )
    return {"losses": losses, "kinds": kinds}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def found(compute: Compute) -> dict[str, Any]:
        world = World(tmp_path_factory.mktemp("alone"))
        return world.one_process(tuned, Plan(batch=BATCH, compute=compute), save_at_end=False)

    return found


LAYOUTS = [Layout(shard=2), Layout(stages=2), quick.further(Layout(shard=2, stages=2))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_of_a_base_in_fp8_have_the_numbers_of_one_process(world: World, alone: Any, layout: Layout) -> None:
    oracle = alone(FP8)
    assert oracle["kinds"] == {
        ("AutocastFloat8Linear", True, False): 4,
        ("AutocastFloat8Linear", False, False): 10,
        ("Linear", False, True): 8,
        ("Linear", False, False): 2,  # the head, and the copy of it that is trained
    }
    found = world(tuned, workers_of(layout), Plan(layout=layout, batch=BATCH, compute=FP8), save_at_end=False)
    for one in found:
        assert_same([{"losses": one["losses"]}], {"losses": oracle["losses"]}, tolerance=1e-5)
    exact = alone(BF16)["losses"]
    assert oracle["losses"] != pytest.approx(exact, rel=1e-5), "products of the base are in 8 bits"
    assert oracle["losses"] == pytest.approx(exact, rel=0.05)
    text = "\n".join(str(line) for line in lines_of(world, 1, "events.jsonl"))
    assert "adapters of peft: base_model.model.model.layers.0.self_attn.q_proj.lora_A.default" in text
