"""What is trained in any layout is exported in the model's own names, and transformers loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

import quick
from forked import World
from layout_runs import WORDS, Text, beside
from paceline.checkpoint.export import export_folder, main_export
from paceline.plan import Batch, Layout, Plan

logging.disable_progress_bar()  # which would leave a thread behind
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LONG = torch.arange(24).view(2, 12) % WORDS


def llama(*, tied: bool) -> PreTrainedModel:
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"])
    return LlamaForCausalLM(config)


def mixtral() -> PreTrainedModel:
    """Its experts are stacked here, and one by one in the files that its makers publish."""
    config = MixtralConfig(**SIZES, num_local_experts=4, architectures=["MixtralForCausalLM"])
    return MixtralForCausalLM(config)


def gpt2() -> PreTrainedModel:
    drop: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=4, architectures=["GPT2LMHeadModel"], **drop
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(tied=False),
    "llama-tied": lambda: llama(tied=True),
    "mixtral": mixtral,
    "gpt2": gpt2,
}


def made(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return MODELS[kind]()


def trained(worker: Any, *, kind: str) -> Tensor | None:
    """The logits after two steps, where the whole model is here."""
    model = worker.prepare(made(kind))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0]).loss)
    for batch in worker.batches(Text(32)):
        step(batch)
    with torch.no_grad():
        return model.eval()(LONG).logits if worker.workers == 1 else None


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        quick.further("llama", Layout(shard=2, tensor=2)),
        ("llama-tied", Layout(shard=2, tensor=2)),
        ("llama", Layout(stages=2)),
        quick.further("llama-tied", Layout(stages=2)),
        ("mixtral", Layout(experts=2)),
        ("gpt2", Layout(tensor=2)),
    ],
    ids=str,
)
def test_transformers_loads_what_was_trained_in_parts(world: World, tmp_path: Path, kind: str, layout: Layout) -> None:
    def run(worker: Any) -> Tensor | None:
        return trained(worker, kind=kind)

    batch = Batch(size=16, micro=4)
    expected = beside(tmp_path).one_process(run, Plan(batch=batch))
    world(run, layout.workers_each, Plan(layout=layout, batch=batch))
    made(kind).config.save_pretrained(tmp_path / "config")
    target = tmp_path / "hf"
    assert main_export(world.run_dir, target, max_shard_bytes=4096, config=tmp_path / "config") == 0
    assert len(list(target.glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    again, told = loaded
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(LONG).logits, expected, rtol=1e-4, atol=1e-5)
    whole = export_folder(world.run_dir / "checkpoints" / "step_00000002", tmp_path / "whole")
    assert [one.name for one in whole] == ["model.safetensors"]
    is_tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert is_tied == (kind in ("llama-tied", "gpt2"))


def saved_pretrained(worker: Any, out: Path, kind: str) -> tuple[str, Any]:
    model = worker.prepare(made(kind))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0]).loss)
    for batch in worker.batches(Text(16)):
        step(batch)
    refused = ""
    if worker.is_first:
        with pytest.raises(RuntimeError) as caught:
            model.save_pretrained(out / "half")
        refused = str(caught.value)
    worker.save_model(out / "ours")
    weights = worker.state_dict(model)
    if worker.is_first:
        model.save_pretrained(out / "theirs", state_dict=dict(weights))  # it empties what it is given
    return refused, weights


@pytest.mark.parametrize(("kind", "layout"), [("llama-tied", Layout(shard=2)), ("mixtral", Layout(experts=2))])
def test_transformers_save_and_load_what_was_split(tmp_path: Path, kind: str, layout: Layout) -> None:
    plan = Plan(layout=layout, batch=Batch(size=16, micro=4))
    (refused, weights), *_ = World(tmp_path)(lambda worker: saved_pretrained(worker, tmp_path, kind), 2, plan)
    assert "save_pretrained(path, state_dict=weights)" in refused
    oracle = made(kind)
    oracle.load_state_dict(weights)
    with torch.no_grad():
        expected = oracle.eval()(input_ids=LONG).logits
        for folder in ("ours", "theirs"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            torch.testing.assert_close(model(input_ids=LONG).logits, expected)
