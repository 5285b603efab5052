"""`paceline export --format huggingface`: what was trained in parts is a folder as transformers and peft write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

import paceline
import quick
from forked import World
from layout_runs import WORDS, Text, beside
from paceline.checkpoint.export import main_export
from paceline.plan import Batch, Layout, Plan
from quantised_models import as_fp8

peft: Any = pytest.importorskip("peft")
logging.disable_progress_bar()  # which would leave a thread behind
BATCH = Batch(size=16, micro=4)
LONG = torch.arange(24).view(2, 12) % WORDS
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def made(kind: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == "llama-tied"))


def base_folder(kind: str, folder: Path) -> Path:
    model = made(kind)
    model.generation_config = GenerationConfig(max_new_tokens=7)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 12}')
    return folder


def fit(worker: Any, model: Any) -> Any:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))
    step = worker.stepper(model, optim, forward=lambda one, micro: one(input_ids=micro[0], labels=micro[0]).loss)
    for batch in worker.batches(Text(32)):
        step(batch)
    return model


def trained(worker: Any, folder: Path) -> tuple[dict[str, Tensor], Tensor | None]:
    model = fit(worker, paceline.from_pretrained(folder))
    with torch.no_grad():
        logits = model.eval()(LONG).logits if worker.workers == 1 else None
    return worker.state_dict(model), logits


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file of safetensors is no mapping
    return found


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama-tied", Layout(shard=2)),
        quick.further("llama", Layout(stages=2)),
        quick.further("llama-tied", Layout(tensor=2)),
        ("mixtral", Layout(experts=2)),
    ],
    ids=str,
)
def test_the_folder_is_the_one_that_transformers_would_write(
    world: World, tmp_path: Path, kind: str, layout: Layout
) -> None:
    base = base_folder(kind, tmp_path / "base")
    _, logits = beside(tmp_path).one_process(lambda worker: trained(worker, base), Plan(batch=BATCH))
    (weights, _), *_ = world(lambda worker: trained(worker, base), 2, Plan(layout=layout, batch=BATCH))
    target = tmp_path / "Tuned-1.0"
    assert main_export(world.run_dir, target, is_huggingface=True, max_shard_bytes=8192) == 0

    loaded: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    again, told = loaded
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(LONG).logits, logits, rtol=1e-4, atol=1e-5)
    assert again.generation_config.max_new_tokens == 7
    assert (target / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (target / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()

    oracle: Any = made(kind)
    oracle.load_state_dict(weights)
    oracle.save_pretrained(tmp_path / "theirs")
    ours, theirs = stored(target), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys(), "the names that the model's makers publish, each tied weight once"
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config, expected = (json.loads((one / "config.json").read_text()) for one in (target, tmp_path / "theirs"))
    assert config["architectures"] == expected["architectures"]
    assert config["dtype"] == "float32"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in theirs.values())
    assert index["weight_map"].keys() == theirs.keys()
    assert set(index["weight_map"].values()) == {one.name for one in target.glob("*.safetensors")}


def test_weights_of_16_bits_are_as_transformers_converts_them_and_the_folder_can_be_loaded_here(
    world: World, tmp_path: Path
) -> None:
    base = base_folder("llama", tmp_path / "base")
    [(weights, _)] = world(lambda worker: trained(worker, base), 1, Plan(batch=BATCH))
    assert main_export(world.run_dir, tmp_path / "half", is_huggingface=True, dtype="bf16") == 0
    model = paceline.from_pretrained(tmp_path / "half")
    assert model.config.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name].bfloat16())


def adapted(worker: Any, folder: Path) -> dict[str, Tensor]:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    base = paceline.from_pretrained(folder)
    torch.manual_seed(0)
    model = fit(worker, peft.get_peft_model(base, lora))
    worker.save_model(folder.parent / "saved", model)
    return worker.state_dict(model)


def test_adapters_name_the_base_that_the_script_named_and_not_a_copy_in_a_cache(world: World, tmp_path: Path) -> None:
    base_folder("llama", tmp_path / "base")
    folder = as_fp8(tmp_path / "base", block=8)
    (folder / "tokenizer.json").write_bytes(b"{}")

    def tuned(worker: Any) -> None:
        base = paceline.from_pretrained(folder, dequantize=True, dtype="fp32", cache_dir=tmp_path / "cache")
        fit(worker, peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])))

    world(tuned, 1, Plan(batch=BATCH))
    assert main_export(world.run_dir, tmp_path / "adapters", is_huggingface=True) == 0
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert (tmp_path / "adapters" / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.parametrize("layout", [Layout(shard=2), quick.further(Layout(stages=2)), quick.further(Layout(tensor=2))])
def test_of_a_model_of_peft_the_adapters_are_exported(world: World, tmp_path: Path, layout: Layout) -> None:
    base = base_folder("llama", tmp_path / "base")
    world(lambda worker: adapted(worker, base), 2, Plan(layout=layout, batch=BATCH))
    target = tmp_path / "adapters"
    assert main_export(world.run_dir, target, is_huggingface=True) == 0
    ours, theirs = stored(target), stored(tmp_path / "saved")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    config, expected = (json.loads((one / "adapter_config.json").read_text()) for one in (target, tmp_path / "saved"))
    assert config == expected
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), target)
    with torch.no_grad():
        assert not torch.equal(model(LONG).logits, AutoModelForCausalLM.from_pretrained(base)(LONG).logits)
