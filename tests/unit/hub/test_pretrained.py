"""`paceline.from_pretrained` in one process: where models come from, what is refused, and that nothing is copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging

import paceline
import quick
from file_memory import resident_kib
from object_servers import CREDENTIALS, s3_server
from paceline.hub.model_folder import model_folder
from paceline.parallel.file_weights import FileMappings
from paceline.parallel.fully_sharded.sharded_units import require_splittable
from paceline.parallel.part_dtype import convert_parts, later_dtype
from paceline.parallel.sample_input import SampleInput
from paceline.storage.object_store import ObjectStore

pytestmark = pytest.mark.thorough  # transformers takes seconds to import
logging.disable_progress_bar()  # which would leave a thread behind


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **options))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    return tmp_path / "base"


def same(model: Any, folder: Path) -> bool:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    found = model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_all_weights_are_the_mapped_bytes_of_the_files(base: Path) -> None:
    model = paceline.from_pretrained(base)
    assert isinstance(model, LlamaForCausalLM)
    assert sum(map(resident_kib, base.glob("*.safetensors"))) == 0, "nothing was read"
    mappings = FileMappings()
    assert [name for name, one in model.named_parameters() if mappings.place_of(one) is None] == []
    assert same(model, base)
    assert same(paceline.from_pretrained(str(base)), base)
    model = paceline.from_pretrained(base, dtype="fp32")
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}, "converted where parts are kept"
    assert {later_dtype(one) for one in model.parameters()} == {torch.float32}
    assert model.config.dtype == torch.float32
    model = paceline.from_pretrained(base, dtype=torch.bfloat16)
    assert {later_dtype(one) for one in model.parameters()} == {torch.bfloat16}
    model = paceline.from_pretrained(base, dtype=torch.float16).float()  # which the user has asked for last
    assert {later_dtype(one) for one in model.parameters()} == {torch.float32}
    assert {one.dtype for one in kept_in_parts(model).values()} == {torch.float32}


def kept_in_parts(model: Any) -> dict[str, torch.Tensor]:
    """What a worker that keeps all of a model has of it."""
    convert_parts(model)
    return model.state_dict()


def as_transformers(folder: Path, dtype: torch.dtype, **options: Any) -> None:
    """Each weight has the type and the numbers that plain transformers loads."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    found = kept_in_parts(paceline.from_pretrained(folder, dtype=dtype, **options))
    assert found.keys() == expected.keys()
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in expected.items()}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_the_files_have_more_precisely_is_rounded_once_at_most(base: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for path in base.glob("*.safetensors"):
        weights = {
            name: torch.randn(one.shape) if "norm" in name or "q_proj" in name else one
            for name, one in load_file(path).items()
        }
        save_file(weights, path, {"format": "pt"})
    as_transformers(base, dtype)
    if dtype == torch.float32:
        model = paceline.from_pretrained(base, dtype=dtype)
        mappings = FileMappings()
        assert [name for name, one in model.named_parameters() if mappings.place_of(one) is None] == []
        sample = SampleInput(kwargs={"input_ids": torch.zeros(1, 4, dtype=torch.long)})
        sample.run(model)  # in one type
        mappings = FileMappings()
        assert [name for name, one in model.named_parameters() if mappings.place_of(one) is None] == []
        sample.run(model.float())


def moe(kind: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    more: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if kind == "ernie":
        more = {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0}
        return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**sizes, **more))
    if kind == "deepseek":
        more |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": 8}
        more |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, "num_key_value_heads": 4}, **more))
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("deepseek", torch.float32),
        ("ernie", torch.bfloat16),
        quick.further("ernie", torch.float32),
        quick.further("deepseek", torch.bfloat16),
        quick.further("mixtral", torch.float32),
        quick.further("mixtral", torch.bfloat16),
    ],
    ids=str,
)
def test_what_transformers_keeps_in_32_bits_stays_so(
    tmp_path: Path, kind: str, own: torch.dtype, dtype: torch.dtype
) -> None:
    moe(kind).to(own).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    routers = [name for name in weights if "gate.weight" in name or "e_score_correction_bias" in name]
    assert len(routers) == {"ernie": 4, "deepseek": 2, "mixtral": 2}[kind]
    torch.manual_seed(1)
    weights |= {name: torch.randn(weights[name].shape) for name in routers}  # in 32 bits, as such folders are published
    save_file(weights, path, {"format": "pt"})
    as_transformers(tmp_path / "base", dtype, cache_dir=tmp_path / "cache")


def test_whether_rows_can_be_split_is_judged_by_the_types_that_weights_will_have(tmp_path: Path) -> None:
    moe("ernie").save_pretrained(tmp_path / "base")
    require_splittable(paceline.from_pretrained(tmp_path / "base", cache_dir=tmp_path / "cache"))
    model = paceline.from_pretrained(tmp_path / "base", dtype="bf16", cache_dir=tmp_path / "cache")
    with pytest.raises(paceline.PlanError, match=r"layers.1 mixes bfloat16 and float32.*one type, .*dtype='fp32'"):
        require_splittable(model)
    require_splittable(paceline.from_pretrained(tmp_path / "base", dtype="fp32", cache_dir=tmp_path / "cache"))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_of_several_types_are_joined_without_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    moe("mixtral").bfloat16().save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    [name] = [name for name in weights if ".0." in name and "experts.2.w1" in name]
    save_file({**weights, name: torch.randn(weights[name].shape)}, path, {"format": "pt"})
    as_transformers(tmp_path / "base", dtype, cache_dir=tmp_path / "cache")
    assert {
        one.dtype for one in paceline.from_pretrained(tmp_path / "base", cache_dir=tmp_path / "cache").parameters()
    } == {torch.bfloat16}


def test_a_joined_copy_is_of_one_class_and_has_no_weights_that_begin_anew(tmp_path: Path) -> None:
    moe("mixtral").save_pretrained(tmp_path / "base")
    cache = tmp_path / "cache"

    def copies() -> list[Path]:
        return sorted(one for one in cache.iterdir() if one.is_dir())

    def load(kind: Any = None, **options: Any) -> Any:
        return paceline.from_pretrained(tmp_path / "base", kind, cache_dir=cache, **options)

    torch.manual_seed(1)
    first = load(AutoModelForSequenceClassification, new=["score.*"], unused=["lm_head.*"], num_labels=3)
    [copy] = copies()
    assert not any("score" in name for name in load_one(copy)) and "model.norm.weight" in load_one(copy)
    again = load(AutoModelForSequenceClassification, new=["score.*"], unused=["lm_head.*"], num_labels=3)
    assert copies() == [copy]
    assert not torch.equal(first.score.weight, again.score.weight), "each begins it anew"
    with pytest.raises(paceline.CheckpointError, match=r"score.weight: not in the files"):
        load(AutoModelForSequenceClassification, unused=["lm_head.*"], num_labels=3)
    with pytest.raises(paceline.CheckpointError, match=r"lm_head.weight: in the files, without a place"):
        load(AutoModelForSequenceClassification, new=["score.*"], num_labels=3)
    assert same(load(), tmp_path / "base"), "its head is in another copy"
    assert same(load(attn_implementation="eager"), tmp_path / "base")
    assert len(copies()) == 2


def test_other_classes_and_options_of_transformers(base: Path) -> None:
    model = paceline.from_pretrained(base, AutoModel, unused=["lm_head.*"], attn_implementation="eager")
    assert type(model).__name__ == "LlamaModel"
    assert model.config._attn_implementation == "eager"
    model = paceline.from_pretrained(
        base, AutoModelForSequenceClassification, new=["score.weight"], unused=["lm_head.weight"], num_labels=3
    )
    assert model.score.weight.shape == (3, 32) and not model.score.weight.is_meta


def test_names_that_differ_are_errors_with_the_names(base: Path, tmp_path: Path) -> None:
    with pytest.raises(paceline.CheckpointError) as caught:
        paceline.from_pretrained(base, AutoModelForSequenceClassification)
    said = str(caught.value)
    assert "score.weight: not in the files" in said and "new=[...]" in said
    save_file({**load_one(base), "stray": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(paceline.CheckpointError, match=r"stray: in the files, without a place in the model"):
        paceline.from_pretrained(tmp_path)
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(paceline.CheckpointError, match="of another shape in the files"):
        paceline.from_pretrained(tmp_path, unused=["stray"])


def load_one(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def test_what_cannot_be_read_in_parts_is_refused_with_the_remedy(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(paceline.PlanError, match=r"are quantised \(fp8\).*dequantize=True"):
        paceline.from_pretrained(base)
    with pytest.raises(paceline.PlanError, match=r"dtype is 'int8'; it must be 'auto', float32, bfloat16 or float16"):
        paceline.from_pretrained(base, dtype="int8")
    with pytest.raises(paceline.PlanError, match=r"device_map=.* is not possible: worker.prepare moves"):
        paceline.from_pretrained(base, device_map="auto")
    with pytest.raises(TypeError, match="a class of transformers is needed"):
        paceline.from_pretrained(base, torch.nn.Linear)
    with pytest.raises(paceline.CheckpointError, match="there is no folder"):
        paceline.from_pretrained(base / "absent")
    with pytest.raises(paceline.CheckpointError, match="is a file: name the folder that has it"):
        paceline.from_pretrained(base / "config.json")


CACHED = """\
import paceline
for name, revision in (("maker/tiny", None), ("maker/other", None), ("maker/tiny", "v2")):
    try:
        model = paceline.from_pretrained(name, revision=revision)
        print("got", type(model).__name__, model.config.name_or_path)
    except paceline.CheckpointError as error:
        print("got", error)
"""


def test_an_id_is_found_in_the_hubs_cache_without_a_network(base: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "home" / "hub" / "models--maker--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", CACHED]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, other, revised = [line for line in done.stdout.splitlines() if line.startswith("got ")]
    assert first == "got LlamaForCausalLM maker/tiny"
    assert "'maker/other' is no folder in" in other and "`hf download maker/other`" in other and "HF_HOME" in other
    assert "at revision 'v2'" in revised and "`hf download maker/tiny --revision v2`" in revised


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with s3_server("bucket") as url:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield


def test_a_folder_in_a_bucket_is_copied_once_to_this_host(
    base: Path, tmp_path: Path, server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore("s3://bucket/models/tiny")
    for path in base.iterdir():
        store.write(path.name, path.read_bytes())
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    assert same(paceline.from_pretrained("s3://bucket/models/tiny"), base)
    [copy] = [one for one in (tmp_path / "cache").iterdir() if one.is_dir()]
    assert model_folder(Path("s3://bucket/models/tiny"), revision=None, cache_dir=None) == copy
    assert model_folder("s3://bucket/models/tiny", revision=None, cache_dir=tmp_path / "own").parent == tmp_path / "own"
    for source in ("s3://bucket/models/tiny", Path("s3://bucket/models/tiny")):
        model = paceline.from_pretrained(source)
        assert model.config.name_or_path == "s3://bucket/models/tiny", "and not the copy, which others do not have"
        assert Path(model.paceline_folder) == copy
    with pytest.raises(ValueError, match="has no revisions"):
        paceline.from_pretrained("s3://bucket/models/tiny", revision="v1")
    with pytest.raises(paceline.CheckpointError, match=r"has no config.json, and nothing else"):
        paceline.from_pretrained("s3://bucket/models/other")
