"""Shared sequences on real workers over gloo: losses and gradients against one process, what is kept, what moves."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quick
from context_models import CASES, HUGGING_FACE, Own, build
from forked import World
from paceline.parallel.context.apply import ContextModel, apply_plan
from paceline.parallel.context.collectives import TorchContextCollectives
from paceline.parallel.context.find_plan import find_plan
from paceline.parallel.recompute import recompute_blocks
from paceline.parallel.tensor.split_tensor import on_parts
from tensor_models import TOKENS, tokens

Gradients = dict[str, Tensor]


def group_of(worker_rank: int, size: int, store: Path) -> TorchContextCollectives:
    """A process group that is nobody's default."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group: Any = dist.ProcessGroupGloo(dist.FileStore(str(store), size), worker_rank, size, timedelta(seconds=120))
    return TorchContextCollectives(group)


def mean_gradients(model: nn.Module, shared: ContextModel) -> Gradients:
    """Of each parameter that any worker has used: the mean over the group."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = shared.ops.group.all_reduce(own) / shared.ops.size
    return found


def difference(found: Gradients, model: nn.Module) -> float:
    """The largest, relative to the largest gradient of the model."""
    expected = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in expected.values())
    assert scale > 0
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items()) / scale


@pytest.mark.parametrize("num_workers", [2, quick.further(4)])
@pytest.mark.parametrize(
    "kind", quick.without(("llama", "bert", "encoder", "llama_padded", "llama_eager", "gpt2_ring"), CASES)
)
def test_workers_compute_what_one_process_does(world: World, tmp_path: Path, kind: str, num_workers: int) -> None:
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    settings = [(torch.float64, 1e-9), (torch.float32, 1e-5)]
    prepared = []
    for dtype, _ in settings:
        model = build(kind, dtype)
        prepared.append((dtype, model, find_plan(model, size=num_workers)))

    def work(worker: Any) -> list[tuple[float, Gradients]]:
        group = group_of(worker.rank, num_workers, tmp_path / "store")
        found = []
        for dtype, model, plan in prepared:
            shared = apply_plan(model, plan, group)
            loss = CASES[kind].loss(model, dtype)
            loss.backward()
            found.append((loss.item(), mean_gradients(model, shared)))
        return found

    everybody = world(work, num_workers)
    for number, (_, tolerance) in enumerate(settings):
        dtype, model, plan = prepared[number]
        assert plan.attentions and not plan.operations
        loss = CASES[kind].loss(model, dtype)
        loss.backward()
        for values in everybody:
            assert values[number][0] == pytest.approx(loss.item(), rel=tolerance)
            assert difference(values[number][1], model) <= tolerance


def own_loss(model: nn.Module) -> Tensor:
    logits = model(tokens(48))
    return F.cross_entropy(logits[:, :-1].reshape(-1, TOKENS), tokens(48)[:, 1:].reshape(-1))


@pytest.mark.parametrize("kind", ["heads", "ring"])
def test_recomputed_blocks_give_the_same_gradients(world: World, tmp_path: Path, kind: Any) -> None:
    model = build("own", torch.float64)
    plan = find_plan(model, size=2, kind=kind)

    def work(worker: Any) -> tuple[float, Gradients, int]:
        recompute_blocks(model)
        shared = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        loss = own_loss(model)
        before = shared.ops.group.traffic.calls["all_to_all"]
        loss.backward()
        calls = shared.ops.group.traffic.calls["all_to_all"]
        return loss.item(), mean_gradients(model, shared), calls - before * 2

    values = world(work, 2)
    loss = own_loss(model)
    loss.backward()
    for found, gradients, more in values:
        assert found == pytest.approx(loss.item(), rel=1e-12)
        assert difference(gradients, model) <= 1e-11
        assert more > 0  # backward moved more than forward's transposes: it did recompute


def kept_bytes(model: nn.Module, work: Any) -> int:
    """Bytes that autograd keeps from `work` until backward, beside parameters and buffers; each storage once."""
    known = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    held: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = work()
    with on_parts():
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    loss.backward()
    return sum(size for place, size in storages.items() if place not in known)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("heads", 2), ("ring", 4), quick.further("heads", 4), quick.further("ring", 2)]
)
def test_each_worker_keeps_its_share_of_activations(world: World, tmp_path: Path, kind: Any, num_workers: int) -> None:
    """Logits and loss included. What is whole: masks and position tables, here small."""
    torch.manual_seed(0)
    model = Own(width=64, num_heads=4, num_key_heads=4)
    plan = find_plan(model, size=num_workers, kind=kind)
    one = kept_bytes(model, lambda: own_loss(model))

    def work(worker: Any) -> int:
        apply_plan(model, plan, group_of(worker.rank, num_workers, tmp_path / "store"))
        return kept_bytes(model, lambda: own_loss(model))

    for found in world(work, num_workers):
        assert found <= 1.1 * one / num_workers


def test_heads_move_what_the_papers_formula_says(world: World, tmp_path: Path) -> None:
    """Of four tensors each attention, a worker's slice, forward and back; and nothing of the output's size."""
    model = Own(width=32, num_heads=4, num_key_heads=4)
    plan = find_plan(model, size=2)

    def work(worker: Any) -> tuple[dict[str, int], dict[str, int]]:
        shared = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        F.cross_entropy(model(tokens(48)).view(-1, TOKENS), tokens(48).view(-1)).backward()
        return dict(shared.ops.group.traffic.calls), dict(shared.ops.group.traffic.num_bytes)

    for calls, num_bytes in world(work, 2):
        assert calls["all_to_all"] == 2 * 2 * 4
        assert num_bytes["all_to_all"] == 2 * 2 * 4 * (3 * 24 * 32 * 4)
        assert calls.keys() == {"all_to_all", "all_reduce"}
        assert num_bytes["all_reduce"] <= 64  # sums of the loss


def test_bf16_by_autocast_is_as_close_as_bf16_is(world: World, tmp_path: Path) -> None:
    model = build("own", torch.float32)
    plans = [find_plan(model, size=2, kind=kind) for kind in ("heads", "ring")]

    def forward(own: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(own(tokens()).float().view(-1, TOKENS), tokens(seed=6).view(-1))

    def work(worker: Any) -> list[Gradients]:
        group, found = group_of(worker.rank, 2, tmp_path / "store"), []
        for plan in plans:
            own = build("own", torch.float32)
            shared = apply_plan(own, plan, group)
            forward(own).backward()
            found.append(mean_gradients(own, shared))
        return found

    values = world(work, 2)
    exact = build("own", torch.float64)
    F.cross_entropy(exact(tokens()).view(-1, TOKENS), tokens(seed=6).view(-1)).backward()
    forward(model).backward()
    own = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    rounding = difference(own, exact)  # what bf16 costs in one process
    for gradients in (one for everybody in values for one in everybody):
        assert difference(gradients, exact) <= 2 * rounding + 1e-3


def test_dropout_differs_between_slices_and_generators_agree_afterwards(world: World, tmp_path: Path) -> None:
    class Dropped(Own):
        def forward(self, idx: Tensor) -> Tensor:
            return F.dropout(torch.ones_like(super().forward(idx)), 0.5, self.training)

    model = Dropped().train()
    plan = find_plan(Own(), size=2)

    def work(worker: Any) -> tuple[Tensor, Tensor]:
        shared = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        torch.manual_seed(3)
        out = shared.whole(model(tokens(8)))
        return out.detach(), torch.rand(4)

    (first, first_next), (second, second_next) = world(work, 2)
    assert torch.equal(first, second)
    assert torch.equal(first_next, second_next)
    assert not torch.equal(first[:, :4], first[:, 4:])
    assert set(first.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("kind", ["own", "llama_padded"])
def test_parameters_may_be_sharded_over_the_same_workers(
    world: World, tmp_path: Path, kind: str, is_first: bool
) -> None:
    """`fully_shard` takes means of gradients, which is what workers that share a sequence need."""
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    model = build(kind, torch.float32)
    plan = find_plan(model, size=2)

    def work(worker: Any) -> tuple[float, Gradients]:
        mesh = init_device_mesh("cpu", (2,))
        group = TorchContextCollectives(mesh.get_group())
        if is_first:
            apply_plan(model, plan, group)
        for name in plan.blocks:
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not is_first:
            apply_plan(model, plan, group)
        loss = CASES[kind].loss(model, torch.float32)
        loss.backward()
        gradients = {
            name: cast(Any, one.grad).full_tensor() for name, one in model.named_parameters() if one.grad is not None
        }
        return loss.item(), gradients

    values = world(work, 2)
    loss = CASES[kind].loss(model, torch.float32)
    loss.backward()
    for found, gradients in values:
        assert found == pytest.approx(loss.item(), rel=1e-5)
        assert difference(gradients, model) <= 1e-5
