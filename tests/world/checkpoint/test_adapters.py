"""Adapters of peft (LoRA) under each layout: the losses of one process, and a folder that peft reads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from forked import World
from paceline.plan import Batch, Layout, Plan
from tuned_models import WORDS, adapted, base, loss_of

peft: Any = pytest.importorskip("peft")
BATCH = Batch(size=8, micro=2)
LAYOUTS = [Layout(replicas=2), Layout(shard=2), Layout(tensor=2), Layout(stages=2)]


def tuned(worker: Any, folder: Path) -> list[float]:
    model = worker.prepare(adapted())
    trained = [one for one in model.parameters() if one.requires_grad]
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(trained, lr=0.1)), forward=loss_of)
    losses = [step(batch).item() for batch in worker.batches(TensorDataset(WORDS), epochs=2)]
    worker.save_model(folder)
    return losses


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Tensor]]:
    scratch = tmp_path_factory.mktemp("one")
    losses = World(scratch).one_process(functools.partial(tuned, folder=scratch / "adapters"), Plan(batch=BATCH))
    return losses, read(scratch / "adapters")


def read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_are_trained_and_saved_as_in_one_process(
    layout: Layout, world: World, tmp_path: Path, expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = expected
    folder = tmp_path / "adapters"
    for found in world(functools.partial(tuned, folder=folder), 2, Plan(layout=layout, batch=BATCH)):
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    saved = read(folder)
    assert saved.keys() == weights.keys()
    for name, one in saved.items():
        torch.testing.assert_close(one, weights[name], rtol=1e-3, atol=1e-4)
    assert len(saved) == 2 * 2 * 2 + 1, "two matrices of two layers in two blocks, and the head: nothing of the rest"
    loaded = peft.PeftModel.from_pretrained(base(), str(folder))
    with torch.no_grad():
        again = float(loss_of(loaded, (WORDS,)))
    assert again < losses[0], "peft reads the folder, and the adapters are those that were trained"
