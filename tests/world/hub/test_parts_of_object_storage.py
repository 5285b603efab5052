"""Each host of a run fetches from object storage what its workers keep, and trains as from a folder."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import paceline
import quick
from forked import World
from layout_runs import WORDS, Text, beside
from object_servers import CREDENTIALS, FaultyProxy, faulty_proxy, s3_server
from paceline.hub import copied_pieces, part_copy
from paceline.plan import Batch, Layout, Plan
from paceline.storage.object_store import ObjectStore

logging.disable_progress_bar()  # which would leave a thread behind
BATCH = Batch(size=16, micro=4)
ADDRESS, PIECE = "s3://bucket/models/base", 1 << 12
LAYOUTS = {
    "stages": Layout(stages=2),
    "shard": Layout(shard=2),
    "tensor": Layout(tensor=2),
    "stages-shard": Layout(stages=2, shard=2),
    "replicas-shard": Layout(replicas=2, shard=2),
}
SPLIT_COLUMNS = ("o_proj.weight", "down_proj.weight")  # a part of each row: under tensor parallel all pieces have some


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = tmp_path_factory.mktemp("far") / "base"
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    return folder


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        for module in (copied_pieces, part_copy):
            patch.setattr(module, "PIECE_BYTES", PIECE)
        with s3_server("bucket") as url:
            patch.setenv("AWS_ENDPOINT_URL", url)
            store = ObjectStore(ADDRESS)
            for path in base.iterdir():
                store.write(path.name, path.read_bytes())
            yield url


@pytest.fixture
def hosts(server: str) -> Iterator[list[FaultyProxy]]:
    """Two hosts' ways to the store."""
    with faulty_proxy(server, seed=1) as first, faulty_proxy(server, seed=2) as second:
        yield [first, second]


@contextlib.contextmanager
def on_host(number: int, hosts: list[FaultyProxy], tmp_path: Path) -> Iterator[Path]:
    """Within it this worker is on another host: with another way to the store, and another disk."""
    before = os.environ["AWS_ENDPOINT_URL"]
    os.environ["AWS_ENDPOINT_URL"] = hosts[number].url
    try:
        yield tmp_path / f"host_{number}"
    finally:
        os.environ["AWS_ENDPOINT_URL"] = before


def loss_of(model: Any, micro: Any) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss.float()


def trained(worker: Any, model: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=loss_of)
    return [float(step(batch)) for batch in worker.batches(Text(32))], worker.state_dict(model)


def weight_bytes(host: FaultyProxy) -> int:
    """The bytes of weights that a host was sent: none of them twice, although several of its workers want some."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path, span, length in host.answers:
        if path.endswith(".safetensors"):
            start = int(span.removeprefix("bytes=").partition("-")[0])
            found.setdefault(path, []).append((start, start + length))
    for spans in found.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans)), spans
    return sum(end - start for spans in found.values() for start, end in spans)


def sizes(base: Path) -> dict[str, int]:
    return {name: one.nbytes for name, one in paceline.from_pretrained(base).named_parameters()}


@pytest.mark.parametrize("name", quick.without(["stages-shard", "replicas-shard"], LAYOUTS))
def test_each_host_fetches_its_part_and_trains_as_from_a_folder(
    world: World, tmp_path: Path, base: Path, hosts: list[FaultyProxy], name: str
) -> None:
    layout = LAYOUTS[name]
    workers = layout.workers_each * (2 if layout.replicas == 2 else 1)

    def near(worker: Any) -> Any:
        return trained(worker, paceline.from_pretrained(base, dtype="fp32"))

    def far(worker: Any) -> Any:
        with on_host(worker.rank * 2 // workers, hosts, tmp_path) as cache:
            return trained(worker, paceline.from_pretrained(ADDRESS, dtype="fp32", cache_dir=cache))

    plan = Plan(layout=layout, batch=BATCH)
    expected, found = beside(tmp_path)(near, workers, plan), world(far, workers, plan)
    for (losses, weights), (found_losses, found_weights) in zip(expected, found, strict=True):
        assert found_losses == losses
        for key, value in weights.items():
            assert torch.equal(found_weights[key], value), key
    num_bytes = sizes(base)
    total, on_all = sum(num_bytes.values()), 0
    if layout.tensor > 1:
        on_all = sum(size for key, size in num_bytes.items() if key.endswith(SPLIT_COLUMNS))
    part = on_all + (total - on_all) // (1 if name == "replicas-shard" else 2)
    for host in hosts:
        came = weight_bytes(host)
        assert came < part + 2 * PIECE * len(num_bytes), f"{came} bytes for a part of {part}"
        if name == "stages":
            assert came < 0.55 * total


def test_a_store_that_fails_at_random_and_a_touch_before_prepare_change_nothing(
    world: World, tmp_path: Path, base: Path, hosts: list[FaultyProxy]
) -> None:
    def touched(model: Any) -> Any:
        """What scripts do with a model before it is prepared."""
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
            model.model.layers[0].mlp.up_proj.weight.data[1:3] = model.model.layers[1].mlp.up_proj.weight[5:7]
        model.model.layers[3].self_attn.q_proj.weight = model.model.layers[2].self_attn.q_proj.weight  # tied
        model.resize_token_embeddings(WORDS + 4, mean_resizing=False)
        return model

    def near(worker: Any) -> Any:
        torch.manual_seed(0)
        return trained(worker, touched(paceline.from_pretrained(base)))

    def far(worker: Any) -> Any:
        with on_host(worker.rank, hosts, tmp_path) as cache:
            torch.manual_seed(0)
            return trained(worker, touched(paceline.from_pretrained(ADDRESS, cache_dir=cache)))

    for host in hosts:
        host.rate = 0.2
    plan = Plan(layout=Layout(shard=2), batch=BATCH)
    expected, found = beside(tmp_path)(near, 2, plan), world(far, 2, plan)
    assert all(host.num_faults for host in hosts)
    for (losses, weights), (found_losses, found_weights) in zip(expected, found, strict=True):
        assert found_losses == losses
        for key, value in weights.items():
            assert torch.equal(found_weights[key], value), key
