"""Cut layers on real workers over gloo: losses and gathered gradients against one process, and what moves."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quick
from forked import World
from paceline.errors import PlanError
from paceline.parallel.tensor.apply import TensorParallelModel, apply_plan
from paceline.parallel.tensor.collectives import TorchTensorCollectives
from paceline.parallel.tensor.find_plan import find_plan
from paceline.parallel.tensor.plan import TensorPlan
from paceline.parallel.torch_functions import on_parts
from tensor_models import CASES, HUGGING_FACE, TOKENS, build, hugging_face, seeded, tokens

Gradients = dict[str, Tensor]


def group_of(rank: int, size: int, store: Path) -> TorchTensorCollectives:
    """A process group that is nobody's default."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group: Any = dist.ProcessGroupGloo(dist.FileStore(str(store), size), rank, size, timedelta(seconds=120))
    return TorchTensorCollectives(group)


def gathered_gradients(model: nn.Module, cut: TensorParallelModel) -> Gradients:
    """Whole gradients, by name."""
    summed = {id(one) for one in cut.summed}
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            if id(parameter) in summed:
                grad = cut.ops.group.all_reduce(grad)
            if name in cut.parameters:
                grad = cut.parameters[name].whole(cut.ops.group.all_gather(grad))
            found[name] = grad
    return found


def difference(found: Gradients, model: nn.Module) -> float:
    """The largest, relative to the largest gradient of the model; unused parameters must be unused in both."""
    expected = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert found.keys() == expected.keys()
    scale = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items()) / scale


@pytest.mark.parametrize("num_workers", [2, quick.further(4)])
@pytest.mark.parametrize("kind", quick.without(("llama", "bert", "vit", "mlp"), CASES))
def test_workers_compute_what_one_process_does(world: World, tmp_path: Path, kind: str, num_workers: int) -> None:
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    settings = [(torch.float64, 1e-9, False), (torch.float32, 1e-5, False)]
    if kind != "vit":  # it has 17 tokens
        settings.append((torch.float64, 1e-9, True))
    prepared = []
    for dtype, _, sequence in settings:
        model = build(kind, dtype)
        prepared.append((dtype, model, find_plan(model, size=num_workers, sequence=sequence)))

    def work(worker: Any) -> list[tuple[float, Gradients]]:
        group = group_of(worker.rank, num_workers, tmp_path / "store")
        found = []
        for dtype, model, plan in prepared:
            cut = apply_plan(model, plan, group)
            loss = CASES[kind].loss(model, dtype)
            loss.backward()
            found.append((loss.item(), gathered_gradients(model, cut)))
        return found

    everybody = world(work, num_workers)
    for number, (dtype, tolerance, _) in enumerate(settings):
        model = prepared[number][1]
        assert prepared[number][2].layers
        loss = CASES[kind].loss(model, dtype)
        loss.backward()
        for values in everybody:
            assert values[number][0] == pytest.approx(loss.item(), rel=tolerance)
            assert difference(values[number][1], model) <= tolerance


def one_step(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], plan: TensorPlan, world: World, store: Path
) -> Any:
    """The gradients of one step on two workers, whole, from worker 0, and what was moved."""

    def work(worker: Any) -> Any:
        cut = apply_plan(model, plan, group_of(worker.rank, plan.size, store))
        cut.ops.group.traffic.clear()
        loss = forward(model)
        loss.backward()
        traffic = dict(cut.ops.group.traffic.calls)
        return loss.item(), gathered_gradients(model, cut), traffic

    return world(work, plan.size)


def test_recomputed_blocks_give_the_same_gradients(world: World, tmp_path: Path) -> None:
    model = build("nano", torch.float64)

    def forward(nano: Any) -> Tensor:
        x = nano.wte(tokens()) + nano.wpe(torch.arange(8))
        for block in nano.h:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(nano.lm_head(nano.ln_f(x)).view(-1, TOKENS), tokens(seed=6).view(-1))

    for sequence in (False, True):
        plan = find_plan(model, size=2, sequence=sequence)
        values = one_step(model, forward, plan, world, tmp_path / f"store_{sequence}")
        whole = copy.deepcopy(model)
        loss = forward(whole)
        loss.backward()
        for found_loss, gradients, traffic in values:
            assert found_loss == pytest.approx(loss.item(), rel=1e-12)
            assert difference(gradients, whole) <= 1e-12
            assert sum(traffic.values()) > sum(calls for calls, _ in plan.collectives().values())  # it did recompute


def test_bf16_by_autocast_is_as_close_as_bf16_is(world: World, tmp_path: Path) -> None:
    model = build("nano", torch.float32)

    def forward(nano: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(nano(tokens()).float().view(-1, TOKENS), tokens(seed=6).view(-1))

    values = one_step(model, forward, find_plan(model, size=2), world, tmp_path / "store")
    exact = build("nano", torch.float64)
    CASES["nano"].loss(exact, torch.float64).backward()
    whole = copy.deepcopy(model)
    forward(whole).backward()
    exact_gradients = {name: one.grad for name, one in exact.named_parameters() if one.grad is not None}
    rounding = difference(exact_gradients, whole)  # what bf16 costs in one process
    for _, gradients, _ in values:
        assert difference(gradients, exact) <= 2 * rounding + 1e-3


def test_dropout_differs_between_parts_and_agrees_outside(world: World, tmp_path: Path) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            inner = F.dropout(torch.ones_like(self.up(x)), 0.5, self.training)
            with torch._C.DisableTorchFunctionSubclass():
                self.kept.append(inner.detach().clone())
            return F.dropout(self.down(inner), 0.5, self.training)

    model = Dropped().train()
    plan = find_plan(model, size=2, sample=(torch.ones(2, 8),))
    model.kept.clear()

    def work(worker: Any) -> Any:
        apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        torch.manual_seed(3)
        out = model(torch.ones(4, 8))
        return [one.as_subclass(Tensor) for one in model.kept], out.detach(), torch.rand(4)

    (first_parts, first, first_next), (second_parts, second, second_next) = world(work, 2)
    assert first_parts[0].shape == (4, 32)
    assert not torch.equal(first_parts[0], second_parts[0])
    assert torch.equal(first, second)
    assert torch.equal(first_next, second_next)


def count_collectives(work: Callable[[], None]) -> dict[str, tuple[int, int]]:
    """Calls and bytes of every collective that torch dispatches within `work`, each counted once and whole."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counted: dict[str, tuple[int, int]] = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            out = func(*args, **(kwargs or {}))
            kinds = {
                "all_reduce": "all_reduce",
                "all_gather_into_tensor": "all_gather",
                "reduce_scatter_tensor": "reduce_scatter",
            }
            if name.startswith("_c10d_functional::") and (kind := kinds.get(name.split("::")[1].rstrip("_"))):
                tensor = args[0] if kind == "reduce_scatter" else out
                calls, num_bytes = counted.get(kind, (0, 0))
                counted[kind] = (calls + 1, num_bytes + tensor.numel() * tensor.element_size())
            return out

    with Counting():
        work()
    return counted


def parallelize_by_hand(model: Any, num_workers: int) -> None:
    """The plan of torch's own tutorial on large Transformers, with each block's input prepared once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (num_workers,))
    whole = Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole),
            "lm_head": ColwiseParallel(output_layouts=whole),
        },
    )
    for block in model.model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )


def test_llama_moves_as_much_as_the_plan_that_is_written_by_hand(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model: Any = build("llama", torch.float32)
    plan = find_plan(model, size=2)

    def step(llama: nn.Module) -> None:
        CASES["llama"].loss(llama, torch.float32).backward()

    def work(worker: Any) -> Any:
        by_hand = copy.deepcopy(model)
        parallelize_by_hand(by_hand, 2)
        hand = count_collectives(lambda: step(by_hand))
        cut = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        cut.ops.group.traffic.clear()
        step(model)
        traffic = cut.ops.group.traffic
        ours = {kind: (traffic.calls[kind], traffic.num_bytes[kind]) for kind in traffic.calls}
        same = by_hand.lm_head.weight.grad.full_tensor(), gathered_gradients(model, cut)["lm_head.weight"]
        return hand, ours, float((same[0] - same[1]).abs().max())

    for hand, ours, off in world(work, 2):
        assert hand == ours
        assert ours["all_reduce"][0] == 2 * 4 + 2  # two pairs in each of two blocks, both ways; embedding, and head
        assert off < 1e-6


def test_tokens_that_do_not_divide_are_refused_in_the_run_too(world: World, tmp_path: Path) -> None:
    model = build("nano", torch.float32)
    plan = find_plan(model, size=2, sequence=True)

    def work(worker: Any) -> str:
        apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        with pytest.raises(PlanError) as error:
            model(tokens(7))
        return str(error.value)

    for text in world(work, 2):
        assert "splits tokens among 2 workers, but wte has 7" in text
        assert "sequence=False" in text


def test_an_unforeseen_operation_gathers_and_says_so(world: World, tmp_path: Path) -> None:
    class Strange(nn.Module):
        sorts = False

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.tanh(self.up(x))
            return self.down(inner.sort(-1).values if self.sorts else inner)

    model = Strange().double()
    plan = find_plan(model, size=2, sample=(torch.ones(2, 8, dtype=torch.float64),))
    assert [layer.role for layer in plan.layers] == ["column", "row"]
    x = seeded((3, 8), torch.float64)

    def work(worker: Any) -> Any:
        model.sorts = True
        cut = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        with pytest.warns(UserWarning, match="sort needs the whole of what is split behind up"):
            model(x).square().sum().backward()
        return gathered_gradients(model, cut)

    model.sorts = True
    everybody = world(work, 2)
    model(x).square().sum().backward()
    for gradients in everybody:
        assert difference(gradients, model) < 1e-12


def test_a_cut_model_of_one_class_is_still_the_users_own(world: World, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model: Any = hugging_face("gpt2")
    plan = find_plan(model, size=2)
    names_before = [name for name, _ in model.named_parameters()]
    whole = {name: one.detach().clone() for name, one in model.named_parameters(remove_duplicate=False)}

    def work(worker: Any) -> Any:
        cut = apply_plan(model, plan, group_of(worker.rank, 2, tmp_path / "store"))
        assert [name for name, _ in model.named_parameters()] == names_before
        assert model.lm_head.weight is model.transformer.wte.weight
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, one in cut.parameters.items():
            with on_parts():
                assert torch.equal(parameters[name], one.part(whole[name], worker.rank))
                assert torch.equal(one.whole(cut.ops.group.all_gather(parameters[name].detach())), whole[name])
        out = model(tokens(), output_attentions=False)
        return (
            type(out.logits) is Tensor,
            out.logits.shape,
            cut.parameters["transformer.h.0.attn.c_attn.weight"].ranges(1),
        )

    for is_plain, shape, ranges in world(work, 2):
        assert is_plain and shape == (3, 8, TOKENS)
        assert ranges == ((16, 32), (48, 64), (80, 96))  # the second half of queries, of keys and of values
