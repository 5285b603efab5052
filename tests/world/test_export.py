"""What is trained in any layout is exported in the model's own names, and transformers loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from forked import World
from layout_runs import WORDS, Text, beside
from paceline.checkpoint.export import export_folder, main_export
from paceline.plan import Batch, Layout, Plan

logging.disable_progress_bar()  # which would leave a thread behind
LONG = torch.arange(24).view(2, 12) % WORDS


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            architectures=["LlamaForCausalLM"],
        )
    )


def trained(worker: Any, *, tied: bool) -> Tensor | None:
    """The logits after two steps, where the whole model is here."""
    model = worker.prepare(llama(tied=tied))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0]).loss)
    for batch in worker.batches(Text(32)):
        step(batch)
    with torch.no_grad():
        return model.eval()(LONG).logits if worker.workers == 1 else None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [Layout(shard=2, tensor=2), Layout(stages=2)])
def test_transformers_loads_what_was_trained_in_parts(
    world: World, tmp_path: Path, layout: Layout, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(worker: Any) -> Tensor | None:
        return trained(worker, tied=tied)

    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(run, Plan(batch=batch))
    world(run, layout.workers_each, Plan(layout=layout, batch=batch))
    llama(tied=tied).config.save_pretrained(tmp_path / "config")
    target = tmp_path / "hf"
    assert main_export(world.run_dir, target, max_shard_bytes=4096, config=tmp_path / "config") == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(LONG).logits, expected, rtol=1e-4, atol=1e-5)
    whole = export_folder(world.run_dir / "checkpoints" / "step_00000002", tmp_path / "whole")
    assert [one.name for one in whole] == ["model.safetensors"]
    assert ("lm_head.weight" in again.state_dict()) and (
        tied == (again.lm_head.weight is again.model.embed_tokens.weight)
    )
