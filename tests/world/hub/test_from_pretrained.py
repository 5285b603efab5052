"""A folder of transformers goes straight into each worker's part, and trains as plain transformers in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging

import paceline
import quick
from forked import World
from layout_runs import WORDS, Text, beside
from paceline.parallel.file_weights import FileMappings
from paceline.plan import Batch, Layout, Plan

peft: Any = pytest.importorskip("peft")
logging.disable_progress_bar()  # which would leave a thread behind
BATCH = Batch(size=16, micro=4)


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
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
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)


def loss_of(model: Any, micro: Any) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss.float()


def trained(
    worker: Any, model: Any, optimizer: Any = torch.optim.AdamW
) -> tuple[list[float], dict[str, Tensor], set[torch.dtype]]:
    model = worker.prepare(model)
    optim = worker.prepare(optimizer(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    losses = [float(step(batch)) for batch in worker.batches(Text(48))]
    types = {one.dtype for one in model.parameters() if not one.is_meta}
    return losses, worker.state_dict(model), types


def parity(
    world: World,
    tmp_path: Path,
    folder: Path,
    layout: Layout,
    *,
    dtype: str = "auto",
    optimizer: Any = torch.optim.AdamW,
    tolerance: float = 1e-4,
) -> None:
    own = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def plain(worker: Any) -> Any:
        return trained(worker, AutoModelForCausalLM.from_pretrained(folder, dtype=own), optimizer)

    def parted(worker: Any) -> Any:
        return trained(worker, paceline.from_pretrained(folder, dtype=dtype), optimizer)

    expected, weights, types = beside(tmp_path).one_process(plain, Plan(batch=BATCH))
    found = world(parted, layout.workers or layout.workers_each, Plan(layout=layout, batch=BATCH))
    for losses, _, here in found:
        assert losses == pytest.approx(expected, rel=tolerance)
        assert here == types
    assert found[0][1].keys() == weights.keys()
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, weights[name], rtol=10 * tolerance, atol=tolerance)


LAYOUTS = {
    "shard": Layout(shard=2),
    "replicas": Layout(replicas=2),
    "stages": Layout(stages=2),
    "tensor": Layout(tensor=2),
}
CUT = {"stages-shard": Layout(stages=2, shard=2)}


@pytest.mark.parametrize("name", quick.without(["replicas", "stages"], LAYOUTS))
def test_each_layout_trains_as_plain_transformers_in_one_process(world: World, tmp_path: Path, name: str) -> None:
    llama().save_pretrained(tmp_path / "base", max_shard_size="40KB")
    assert (tmp_path / "base" / "model.safetensors.index.json").exists()
    parity(world, tmp_path, tmp_path / "base", LAYOUTS[name])


@pytest.mark.parametrize("name", quick.without(["shard", "replicas", "tensor"], LAYOUTS))
def test_tied_weights_stay_tied(world: World, tmp_path: Path, name: str) -> None:
    llama(tied=True).save_pretrained(tmp_path / "base")
    parity(world, tmp_path, tmp_path / "base", LAYOUTS[name])


@pytest.mark.parametrize("name", quick.without(["tensor", "replicas", "stages-shard"], [*LAYOUTS, *CUT]))
def test_parts_of_16_bit_files_are_converted_where_they_are_kept(world: World, tmp_path: Path, name: str) -> None:
    llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    parity(world, tmp_path, tmp_path / "base", {**LAYOUTS, **CUT}[name], dtype="fp32")


@pytest.mark.parametrize("name", quick.without(["tensor", "replicas", "stages", "stages-shard"], [*LAYOUTS, *CUT]))
def test_tensors_that_files_have_more_precisely_keep_their_numbers(world: World, tmp_path: Path, name: str) -> None:
    llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    torch.manual_seed(5)
    weights = {
        name: one + torch.randn(one.shape) / 100 if "norm" in name or "q_proj" in name else one
        for name, one in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    layout = {**LAYOUTS, **CUT}[name]

    def prepared(worker: Any) -> dict[str, Tensor]:
        return worker.state_dict(worker.prepare(paceline.from_pretrained(tmp_path / "base", dtype="fp32")))

    own = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    found = world(prepared, layout.workers or layout.workers_each, Plan(layout=layout, batch=BATCH))[0]
    assert found.keys() == own.keys()
    assert not [key for key, value in found.items() if not torch.equal(value, own[key])]
    # Adam divides by a gradient's own size, and so makes the last bit of a small one larger.
    parity(world, tmp_path, tmp_path / "base", layout, dtype="fp32", optimizer=torch.optim.SGD, tolerance=1e-5)


@pytest.mark.parametrize("dtype", ["auto", quick.further("fp32")])
def test_each_worker_reads_its_experts_which_files_have_one_by_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    own = torch.float32 if dtype == "auto" else torch.bfloat16
    model: Any = MixtralForCausalLM(config)
    model.to(own).save_pretrained(tmp_path / "base")
    parity(world, tmp_path, tmp_path / "base", Layout(experts=2), dtype=dtype)
    model = paceline.from_pretrained(tmp_path / "base")
    mappings = FileMappings()
    assert [name for name, one in model.named_parameters() if mappings.place_of(one) is None] == []
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == 1


def continued(worker: Any, folder: Path, *, epochs: int, dtype: str = "fp32") -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(paceline.from_pretrained(folder, dtype=dtype))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    return [float(step(batch)) for batch in worker.batches(Text(32), epochs=epochs)], worker.state_dict(model)


def goes_on(
    world: World, tmp_path: Path, first: Layout, then: Layout, run: Callable[..., tuple[list[float], dict[str, Tensor]]]
) -> None:
    """Train two epochs in one process, and one epoch each under two layouts of two workers each."""
    expected, weights = beside(tmp_path).one_process(lambda worker: run(worker, epochs=2), Plan(batch=BATCH))
    world(lambda worker: run(worker, epochs=1), 2, Plan(layout=first, batch=BATCH))
    found = world(lambda worker: run(worker, epochs=2), 2, Plan(layout=then, batch=BATCH))
    for losses, here in found:
        assert losses == pytest.approx(expected[2:], rel=1e-4)
        for name, value in here.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(shard=2), Layout(replicas=2)),
        quick.further(Layout(replicas=2), Layout(tensor=2)),
        quick.further(Layout(shard=2), Layout(stages=2)),
        quick.further(Layout(replicas=2), Layout(shard=2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_converted_weights_goes_on_under_another_layout(
    world: World, tmp_path: Path, first: Layout, then: Layout
) -> None:
    llama(dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    goes_on(world, tmp_path, first, then, lambda worker, epochs: continued(worker, tmp_path / "base", epochs=epochs))


@pytest.mark.further
@pytest.mark.parametrize("then", [Layout(replicas=2), Layout(tensor=2)], ids=str)
def test_a_checkpoint_fills_mapped_weights_on_all_workers(world: World, tmp_path: Path, then: Layout) -> None:
    llama().save_pretrained(tmp_path / "base")

    def run(worker: Any, epochs: int) -> tuple[list[float], dict[str, Tensor]]:
        return continued(worker, tmp_path / "base", epochs=epochs, dtype="auto")

    goes_on(world, tmp_path, Layout(replicas=2), then, run)


def with_adapters(base: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    )


def adapted(worker: Any, model: Any, *, epochs: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    return [float(step(batch)) for batch in worker.batches(Text(32), epochs=epochs)], worker.state_dict(model)


@pytest.mark.parametrize("layout", [Layout(shard=2), quick.further(Layout(stages=2)), quick.further(Layout(tensor=2))])
def test_a_base_of_adapters_is_converted_in_parts(world: World, tmp_path: Path, layout: Layout) -> None:
    folder = tmp_path / "base"
    llama(dtype=torch.bfloat16).save_pretrained(folder)

    def plain(worker: Any) -> Any:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return adapted(worker, with_adapters(base).float())  # peft begins adapters in the type of the base

    def parted(worker: Any) -> Any:
        return adapted(worker, with_adapters(paceline.from_pretrained(folder, dtype="fp32")))

    expected, weights = beside(tmp_path).one_process(plain, Plan(batch=BATCH))
    (losses, found), *_ = world(parted, 2, Plan(layout=layout, batch=BATCH))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert found.keys() == weights.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("own", "then"),
    [
        (torch.bfloat16, Layout(replicas=2)),
        quick.further(torch.float32, Layout(replicas=2)),
        quick.further(torch.bfloat16, Layout(tensor=2)),
        quick.further(torch.float32, Layout(tensor=2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_adapters_goes_on_with_the_base_of_the_files(
    world: World, tmp_path: Path, own: torch.dtype, then: Layout
) -> None:
    llama(dtype=own).save_pretrained(tmp_path / "base")

    def run(worker: Any, epochs: int) -> tuple[list[float], dict[str, Tensor]]:
        model = with_adapters(paceline.from_pretrained(tmp_path / "base", dtype="fp32"))
        return adapted(worker, model, epochs=epochs)

    goes_on(world, tmp_path, Layout(shard=2), then, run)
