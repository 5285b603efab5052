"""Quantised folders in one process: the numbers are those of transformers, and what cannot be done is said."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config

import paceline
import quick
from paceline.hub.quantised import find_quantisation
from paceline.parallel.file_weights import FileMappings
from paceline.parallel.meta.fake_weights import fake_weights
from paceline.parallel.part_dtype import convert_parts, later_dtype
from quantised_models import as_fp8, as_mxfp4, in_blocks, rewritten

logging.disable_progress_bar()  # which would leave a thread behind
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WORDS = torch.randint(2, 40, (2, 8), generator=torch.Generator().manual_seed(1))


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).bfloat16()


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    few: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    if kind == "qwen":
        sizes: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **few)).bfloat16()
    if kind == "deepseek":
        few |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 8}
        few |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **few)).bfloat16()
    if kind == "gpt-oss":
        wide = {**SIZES, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
        return GptOssForCausalLM(
            GptOssConfig(**wide, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
        ).bfloat16()
    return llama()


def quantised(folder: Path, kind: str) -> tuple[Path, Any]:
    """A folder, and how transformers is told to dequantise it."""
    model_of(kind).save_pretrained(folder)
    if kind == "gpt-oss":
        return as_mxfp4(folder), Mxfp4Config(dequantize=True)
    return as_fp8(folder, block=8), FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))


def not_mapped(model: Any) -> list[str]:
    mappings = FileMappings()
    return [name for name, one in model.named_parameters() if mappings.place_of(one) is None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen", "gpt-oss", quick.further("deepseek")])
def test_dequantised_weights_are_mapped_and_those_of_transformers(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder, config = quantised(tmp_path / "base", kind)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
    if dtype == torch.float32:
        expected = expected.float()  # transformers leaves what is not quantised in 16 bits
    model = paceline.from_pretrained(folder, dtype=dtype, dequantize=True, cache_dir=tmp_path / "cache")
    assert type(model) is type(expected)
    assert not_mapped(model) == []
    assert not hasattr(model.config, "quantization_config")
    assert model.config.dtype == dtype
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].dtype != wanted[name].dtype] == []
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    with torch.no_grad():
        assert torch.equal(model(WORDS).logits, expected(WORDS).logits)


@pytest.mark.parametrize("block", [12, 24])  # 32 rows have 3 blocks, and 2, the last of which are cut short
def test_blocks_that_are_cut_short_at_an_edge_keep_their_scales(tmp_path: Path, block: int) -> None:
    llama().save_pretrained(tmp_path / "base")
    folder = as_fp8(tmp_path / "base", block=block)
    stored = load_file(folder / "model.safetensors")
    model = paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")
    checked = 0
    for name, value in model.state_dict().items():
        codes, scales = stored[name], stored.get(f"{name}_scale_inv")
        if scales is not None:
            numbers = codes.float() * in_blocks(scales, block, tuple(codes.shape))
            assert torch.equal(value, numbers.bfloat16()), name
            checked += 1
    assert checked == 2 * 7


def test_one_copy_is_made_of_a_folder_a_class_and_a_type(tmp_path: Path) -> None:
    folder, _ = quantised(tmp_path / "base", "llama")
    cache = tmp_path / "cache"

    def load(**options: Any) -> Any:
        return paceline.from_pretrained(folder, dequantize=True, cache_dir=cache, **options)

    def copies() -> dict[str, int]:
        return {one.name: one.stat().st_mtime_ns for one in cache.iterdir() if one.is_dir()}

    first = load()
    assert first.dtype == torch.bfloat16, "as the configuration says it, and not that of the scales"
    made = copies()
    [name] = made
    assert name.startswith("dequantised-")
    assert not list(cache.glob("*.partial"))
    load(attn_implementation="eager")
    load(config=AutoConfig.from_pretrained(folder))  # which says that the weights are quantised
    config: Any = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    load(config=config)
    assert made.items() <= copies().items()
    load(dtype="fp32")
    written = len(copies())
    load(dtype="fp32")
    assert len(copies()) == written
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())
    load()
    assert len(copies()) == written + 1, "of files that were written again"


def test_a_model_that_is_looked_at_without_weights_has_its_copy_made(tmp_path: Path) -> None:
    folder, _ = quantised(tmp_path / "base", "qwen")
    with fake_weights():
        model = paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")
    assert all(one.is_meta for one in model.parameters())
    model = paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")
    assert not_mapped(model) == []


def test_dequantise_has_no_effect_on_ordinary_files(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    model = paceline.from_pretrained(tmp_path / "base", dequantize=True, cache_dir=tmp_path / "cache")
    assert not_mapped(model) == []
    assert not (tmp_path / "cache").exists()


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    folder = as_fp8(tmp_path / "base", block=8)
    config = json.loads((folder / "config.json").read_text())

    def with_scales(name: str, one: torch.Tensor) -> dict[str, torch.Tensor]:
        is_codes = name.endswith("proj.weight")
        return {name: one} | ({name.replace("weight", "input_scale"): torch.ones(1)} if is_codes else {})

    rewritten(folder, with_scales, config["quantization_config"])
    model = paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")
    assert not any("scale" in name for name in model.state_dict())


def test_the_memory_of_a_copy_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = llama(**sizes)
    whole = sum(one.nbytes for one in model.parameters())
    model.save_pretrained(tmp_path / "base")
    del model
    folder = as_fp8(tmp_path / "base", block=128)
    seen: list[int] = []

    def look(*_: Any) -> None:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        seen.append(int(found[1]) * 1024)

    handle = register_module_parameter_registration_hook(look)
    try:
        paceline.from_pretrained(folder, dtype="fp32", dequantize=True, cache_dir=tmp_path / "cache")
    finally:
        handle.remove()
    assert whole > 20e6
    assert max(seen) - seen[0] < whole / 2, "of fp32 weights that take twice `whole`"


class Space(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = quantised(tmp_path / "base", "llama")

    def full(path: object) -> Space:
        return Space(100, 99, 1)

    monkeypatch.setattr(shutil, "disk_usage", full)
    with pytest.raises(paceline.CheckpointError, match=r"are dequantised to bfloat16, which takes .* cache_dir="):
        paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")


def described(folder: Path, about: dict[str, Any]) -> Path:
    return rewritten(folder, lambda name, one: {name: one}, about)


def test_what_cannot_be_read_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "base")
    folder, cache = as_fp8(tmp_path / "base", block=8), tmp_path / "cache"

    def refused(match: str, **options: Any) -> None:
        with pytest.raises(paceline.PlanError, match=match):
            paceline.from_pretrained(folder, cache_dir=cache, **options)

    refused(r"are quantised \(fp8\).*dequantize=True\) writes one dequantised copy")
    refused("dequantize=True dequantises them", quantization_config=FineGrainedFP8Config(dequantize=True))
    described(folder, {"quant_method": "gptq", "bits": 4})
    refused(r"are quantised \(gptq\).*16 bits; transformers cannot dequantise these")
    refused(r"are quantised \(gptq\), which transformers cannot dequantise.*16 bits", dequantize=True)
    described(folder, {"quant_method": "of tomorrow"})
    refused(r"quantised \(of tomorrow\), which transformers cannot dequantise", dequantize=True)
    described(folder, {"load_in_4bit": True, "quant_method": "bitsandbytes"})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    refused(r"are quantised \(bitsandbytes\), and this Python does not have the package: pip install bitsandbytes")


def test_a_part_of_the_configuration_may_say_how_weights_are_quantised(tmp_path: Path) -> None:
    about = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    config = {"model_type": "of text and images", "text_config": {"dtype": "bfloat16", "quantization_config": about}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = find_quantisation(tmp_path)
    assert found is not None
    assert (found.method, found.about) == ("fp8", about)
    assert found.plain_config == {"model_type": "of text and images", "text_config": {"dtype": "bfloat16"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "text_config": {}}))
    assert find_quantisation(tmp_path) is None


def test_a_package_that_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "base")
    weights: Any = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    about = {
        "quant_method": "compressed-tensors",
        "config_groups": {"one": {"targets": ["Linear"], "weights": weights}},
    }
    folder = described(tmp_path / "base", {**about, "format": "int-quantized"})
    from transformers.quantizers import quantizer_compressed_tensors

    monkeypatch.setattr(quantizer_compressed_tensors, "is_compressed_tensors_available", lambda: False)
    with pytest.raises(paceline.PlanError, match=r"\(compressed-tensors\), and this Python lacks .*compressed.tensors"):
        paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache")


def test_tensors_of_torchao_are_dequantised(tmp_path: Path) -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    model = llama()
    model.save_pretrained(tmp_path / "plain")
    config = TorchAoConfig(quantization.Int8WeightOnlyConfig(version=2))
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, quantization_config=config)
    made.save_pretrained(tmp_path / "base")
    expected = {name: getattr(one, "dequantize", lambda one=one: one)() for name, one in made.named_parameters()}
    loaded = paceline.from_pretrained(tmp_path / "base", dequantize=True, cache_dir=tmp_path / "cache")
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in expected if type(found[name].data) is not torch.Tensor] == []
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert not torch.equal(found["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)
    with pytest.raises(paceline.PlanError, match=r"\(torchao\).*dequantize=True"):
        paceline.from_pretrained(tmp_path / "base")


def as_bitsandbytes(tmp_path: Path, **about: Any) -> Path:
    from transformers import BitsAndBytesConfig

    llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**about)
    )
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "in bf16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_bitsandbytes_are_mapped_or_dequantised(tmp_path: Path, kind: str) -> None:
    folder = as_bitsandbytes(tmp_path, **KINDS[kind])
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    kept = paceline.from_pretrained(folder, dtype="fp32")
    assert not_mapped(kept) == []
    types = {name: later_dtype(one) for name, one in kept.named_parameters()}
    codes = {name for name in types if "proj" in name}
    assert {types[name] for name in types.keys() - codes} == {torch.float32}
    before = {name: one.clone() for name, one in expected.named_parameters()}
    convert_parts(kept)
    now = dict(kept.named_parameters())
    for name in codes:  # as bytes: codes that are stored as bf16 may be no numbers
        assert torch.equal(now[name].data.view(torch.uint8), before[name].data.view(torch.uint8)), name
    numbers = expected.dequantize(torch.bfloat16).state_dict()
    made = paceline.from_pretrained(folder, dequantize=True, cache_dir=tmp_path / "cache").state_dict()
    assert made.keys() == numbers.keys()
    assert [name for name in numbers if not torch.equal(made[name], numbers[name])] == []
