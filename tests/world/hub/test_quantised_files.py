"""Quantised folders under every layout: dequantised in one copy for each host, or kept as the base of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

import paceline
import quick
from forked import World
from layout_runs import WORDS, Text, beside
from paceline.plan import Batch, Layout, Plan
from quantised_models import as_fp8

peft: Any = pytest.importorskip("peft")
logging.disable_progress_bar()  # which would leave a thread behind
BATCH = Batch(size=16, micro=4)
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYOUTS = {
    "shard": Layout(shard=2),
    "replicas": Layout(replicas=2),
    "stages": Layout(stages=2),
    "tensor": Layout(tensor=2),
}


def llama(folder: Path) -> Path:
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4)).bfloat16().save_pretrained(folder)
    return folder


def experts(folder: Path) -> Path:
    torch.manual_seed(3)
    more: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more, num_hidden_layers=2)).bfloat16().save_pretrained(folder)
    return folder


def loss_of(model: Any, micro: Any) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss.float()


def trained(worker: Any, model: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(model.train())
    optim = worker.prepare(torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    return [float(step(batch)) for batch in worker.batches(Text(48))], worker.state_dict(model)


def with_adapters(base: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def compare(world: World, expected: Any, worker_of: Any, layout: Layout, *, tolerance: float = 1e-4) -> None:
    losses, weights = expected
    for found, here in world(worker_of, 2, Plan(layout=layout, batch=BATCH)):
        assert found == pytest.approx(losses, rel=tolerance)
        for name, value in here.items():
            assert value.dtype == weights[name].dtype
            if value.dtype == torch.bfloat16:  # codes, which may be those of NaN
                assert torch.equal(value.view(torch.int16), weights[name].view(torch.int16)), name
            else:
                torch.testing.assert_close(value, weights[name], rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("dense", Layout(shard=2)),
        ("experts", Layout(experts=2)),
        ("dense", Layout(stages=2)),
        quick.further("dense", Layout(tensor=2)),
        quick.further("dense", Layout(replicas=2)),
        quick.further("experts", Layout(shard=2)),
    ],
    ids=str,
)
def test_dequantised_weights_train_as_those_of_transformers_in_one_process(
    world: World, tmp_path: Path, kind: str, layout: Layout
) -> None:
    folder = as_fp8({"dense": llama, "experts": experts}[kind](tmp_path / "base"), block=16)
    cache = tmp_path / "cache"

    def plain(worker: Any) -> Any:
        config = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
        return trained(worker, model.float())  # transformers leaves what is not quantised in 16 bits

    def parted(worker: Any) -> Any:
        return trained(worker, paceline.from_pretrained(folder, dtype="fp32", dequantize=True, cache_dir=cache))

    expected = beside(tmp_path).one_process(plain, Plan(batch=BATCH))
    compare(world, expected, parted, layout)
    assert len([one for one in cache.iterdir() if one.is_dir()]) == 1, "one copy, which all workers read"


@pytest.mark.parametrize(
    ("bits", "name"),
    [("nf4", name) for name in LAYOUTS]
    + [quick.further(bits, name) for bits in ("nested", "int8", "in bf16") for name in LAYOUTS],
)
def test_codes_are_kept_as_the_frozen_base_of_adapters(world: World, tmp_path: Path, bits: str, name: str) -> None:
    from transformers import BitsAndBytesConfig

    four: Any = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    about: Any = {"nf4": four, "nested": {**four, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}
    about["in bf16"] = {**four, "bnb_4bit_quant_storage": torch.bfloat16}
    folder, plain_folder = tmp_path / "base", llama(tmp_path / "plain")
    config = BitsAndBytesConfig(**about[bits])
    AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32, quantization_config=config).save_pretrained(
        folder
    )

    def plain(worker: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return trained(worker, with_adapters(base))

    def parted(worker: Any) -> Any:
        return trained(worker, with_adapters(paceline.from_pretrained(folder)))

    expected = beside(tmp_path).one_process(plain, Plan(batch=BATCH))
    compare(world, expected, parted, LAYOUTS[name])
