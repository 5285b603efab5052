"""A folder of transformers goes straight into each worker's part, and trains as plain transformers in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import paceline
from forked import World
from layout_runs import WORDS, Text, beside
from paceline.plan import Batch, Layout, Plan

logging.disable_progress_bar()  # which would leave a thread behind
BATCH = Batch(size=16, micro=4)
LONG = torch.arange(24).view(2, 12) % WORDS


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def loss_of(model: Any, micro: Any) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss.float()


def trained(worker: Any, model: Any) -> tuple[list[float], dict[str, Tensor], set[torch.dtype]]:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    losses = [float(step(batch)) for batch in worker.batches(Text(48))]
    types = {one.dtype for one in model.parameters() if not one.is_meta}
    return losses, worker.state_dict(model), types


def parity(
    world: World, tmp_path: Path, folder: Path, layout: Layout, *, dtype: str = "auto", tolerance: float = 1e-4
) -> None:
    own = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def plain(worker: Any) -> Any:
        return trained(worker, AutoModelForCausalLM.from_pretrained(folder, dtype=own))

    def parted(worker: Any) -> Any:
        return trained(worker, paceline.from_pretrained(folder, dtype=dtype))

    expected, weights, types = beside(tmp_path).one_process(plain, Plan(batch=BATCH))
    found = world(
        parted,
        2 * layout.workers_each if layout.replicas == 2 else layout.workers_each,
        Plan(layout=layout, batch=BATCH),
    )
    for losses, _, here in found:
        assert losses == pytest.approx(expected, rel=tolerance)
        assert here == types
    assert found[0][1].keys() == weights.keys()
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=10 * tolerance, atol=tolerance)


LAYOUTS = {
    "replicas": Layout(replicas=2),
    "shard": Layout(shard=2),
    "tensor": Layout(tensor=2),
    "stages": Layout(stages=2),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_trains_as_plain_transformers_in_one_process(
    world: World, tmp_path: Path, name: str, tied: bool
) -> None:
    llama(tied=tied).save_pretrained(tmp_path / "base", max_shard_size="40KB")
    assert (tmp_path / "base" / "model.safetensors.index.json").exists()
    parity(world, tmp_path, tmp_path / "base", LAYOUTS[name])


@pytest.mark.parametrize("name", [*LAYOUTS, "stages-shard"])
def test_parts_of_16_bit_files_are_converted_where_they_are_kept(world: World, tmp_path: Path, name: str) -> None:
    llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    layout = {**LAYOUTS, "stages-shard": Layout(stages=2, shard=2)}[name]
    parity(world, tmp_path, tmp_path / "base", layout, dtype="fp32")
