"""Errors to plant into the layouts' own code, one at a time, and runs that show whether parity finds and places them.

Each error is a change of one function of the package, made in the workers of a configuration. Most are planted when the
model is prepared, because its checks would refuse them. The reference is one process without the error. Names of
modules are patterns, as in a file's name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import expert_models
from forked import WorkersFailed, World
from layout_runs import Net, Text, next_word
from paceline.cli.parity.compare import CaptureReader, compare
from paceline.cli.parity.localize import Departure, locate
from paceline.cli.parity.report import ParityVerdict, Tolerance
from paceline.cli.parity.where import ask_for_modules
from paceline.parallel.context import collectives as context_collectives
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.expert import apply as expert_apply
from paceline.parallel.fully_sharded.collectives import ShardAllGather, ShardReduceScatter
from paceline.parallel.pipeline import stage_worker
from paceline.parallel.tensor import collectives as tensor_collectives
from paceline.parallel.tensor import layers as tensor_layers
from paceline.parallel.tensor.plan import ParameterSplit
from paceline.parallel.tensor.split_tensor import TensorGroupOps
from paceline.plan import Batch, Plan
from paceline.sync.allreduce.gradient_norm import GradientNorm
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.sync.allreduce.gradient_sharding import TensorParallelGradients
from paceline.worker.data import random_state
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.state import model_layout
from paceline.worker.step import gradient_pass
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.step.pipeline_stages import TiedStageGradients

__all__ = ["ERRORS", "FAST", "Outcome", "PlantedError", "Trials", "table"]

STEPS = 3
Plant = Callable[[Any], None]  # changes the package in one worker


# ------------------------------------------------------------------------------------------------------------ programs


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.Dropout(0.3),
            nn.Linear(12, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def _trained(worker: Any, model: nn.Module, data: Any, loss: Any, clip_norm: float | None) -> None:
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    step = worker.stepper(model, optim, loss, clip_norm=clip_norm)
    for batch in worker.batches(data, epochs=2):
        step(batch)


def _text(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, Net(0.0), Text(24), next_word, 0.5)


def _unclipped_text(worker: Any) -> None:
    """Clipping would hide a factor of all gradients."""
    torch.manual_seed(3)
    _trained(worker, Net(0.0), Text(24), next_word, None)


def _unequal_text(worker: Any) -> None:
    torch.manual_seed(3 + worker.rank)
    _trained(worker, Net(0.0), Text(24), next_word, 0.5)


def _mixture(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, expert_models.MoeNet(drop=0.0), Text(24), next_word, 0.5)


def _normed(worker: Any) -> None:
    torch.manual_seed(3)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    _trained(worker, Normed(), TensorDataset(x, x[:, :4].argmax(1)), F.cross_entropy, None)


# -------------------------------------------------------------------------------------------------------------- errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedError:
    """One error: what it is, under which layout, how it is planted, and which modules may be named for it."""

    what: str
    layout: str
    plant: Plant
    expected: tuple[str, ...]
    program: Callable[[Any], None] = _text
    reference: Callable[[Any], None] | None = None  # None: the same program
    is_early: bool = (
        False  # planted before the model is prepared, whose checks then see it; else before the first batch
    )

    @property
    def workers(self) -> int:
        return 2 if "+replicas" not in self.layout else 4


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def _replace(owner: Any, name: str, value: Any) -> Plant:
    return lambda _: setattr(owner, name, value)


def _result(owner: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what a function returns."""
    return lambda _: _wrap(owner, name, lambda before: lambda *a, **k: change(before(*a, **k)))


def _row(change: Callable[[Any, Any, Any], Any], only: str) -> Plant:
    """Change the forward of one row layer: change(module, ops, result)."""

    def make(before: Any) -> Any:
        def row(module: Any, kind: Any, layer: Any, ops: Any, x: Any) -> Any:
            out = before(module, kind, layer, ops, x)
            return change(module, ops, out) if layer.name == only else out

        return row

    return lambda _: tensor_layers.FORWARDS.__setitem__("row", make(tensor_layers.FORWARDS["row"]))


def _not_summed_at(site: str) -> Plant:
    def make(before: Any) -> Any:
        return lambda ops, partial, *, site: partial if site == wanted else before(ops, partial, site=site)

    wanted = site
    return lambda _: _wrap(TensorGroupOps, "leave", make)


def _fused_as_one(_: Any) -> None:
    def make(before: Any) -> Any:
        def part(split: Any, whole: Any, index: int) -> Any:
            if "blocks.0.qkv" not in split.name:
                return before(split, whole, index)
            rows = whole.shape[0] // split.size
            return whole.narrow(0, index * rows, rows).clone()  # queries, keys and values taken for one

        return part

    _wrap(ParameterSplit, "part", make)


def _other_part(_: Any) -> None:
    def make(before: Any) -> Any:
        def part(split: Any, whole: Any, index: int) -> Any:
            at = split.size - 1 - index if "blocks.0.out.weight" in split.name else index
            return before(split, whole, at).clone()

        return part

    _wrap(ParameterSplit, "part", make)


def _unmasked(_: Any) -> None:
    def vocabulary(module: Any, kind: Any, layer: Any, ops: Any, tokens: Any) -> Any:
        rows = ops.plain(tokens) % module.weight.shape[0]  # rows of other workers are not left out
        return ops.leave(F.embedding(rows, module.weight), site=layer.name)

    tensor_layers.FORWARDS["vocabulary"] = vocabulary


def _completed(times: int) -> Plant:
    def make(before: Any) -> Any:
        def complete(sharding: Any, parameters: Any) -> None:
            for _ in range(times):
                before(sharding, parameters)

        return complete

    return lambda _: _wrap(TensorParallelGradients, "complete", make)


def _counted(counts: Callable[[Any, Any], bool]) -> Plant:
    return _replace(TensorParallelGradients, "counts", counts)


def _positions_of_first(_: Any) -> None:
    def scatter(ops: Any, tensor: Any, *, dim: int, sections: Any) -> Any:
        index = 0 if tensor.is_floating_point() else ops.index  # positions begin at 0 on every worker
        ranges = context_collectives.slices(sections, size=ops.size, index=index)
        return context_collectives.slice_from(tensor, dim=dim, ranges=ranges)

    _replace(ContextGroupOps, "scatter", scatter)(None)


def _scaled_land(factor: float) -> Plant:
    def make(before: Any) -> Any:
        return lambda gradients, *, scale: before(gradients, scale=scale * factor)

    return lambda _: _wrap(GradientReducer, "land", make)


def _after_land(change: Callable[[Any, Any], None]) -> Plant:
    """Change the gradients after the sum: change(worker, {name: parameter})."""

    def plant(worker: Any) -> None:
        def make(before: Any) -> Any:
            def land(gradients: Any, *, scale: float) -> None:
                before(gradients, scale=scale)
                named = zip(gradients.names, gradients.parameters, strict=True)
                change(worker, {name: one for name, one in named if one.grad is not None})

            return land

        _wrap(GradientReducer, "land", make)

    return plant


def _stale(name: str) -> Plant:
    kept: dict[str, Tensor] = {}

    def change(worker: Any, parameters: Any) -> None:
        now = parameters[name].grad.clone()
        if name in kept:
            parameters[name].grad.copy_(kept[name])
        kept[name] = now

    return _after_land(change)


def _in_bf16(worker: Any, parameters: Any) -> None:
    for parameter in parameters.values():
        parameter.grad.copy_(parameter.grad.bfloat16().to(parameter.grad.dtype))


def _own_loss_weight(worker: Any) -> None:
    factor = 2.0 if worker.rank == 0 else 1.0

    def make(before: Any) -> Any:
        return lambda losses: (before(losses)[0] * factor, before(losses)[1])

    _wrap(gradient_pass, "_loss_and_weight", make)


def _full_micro_batches(_: Any) -> None:
    _wrap(gradient_pass, "_weighed", lambda before: lambda loss, num_micro, num_step: before(loss, 3, num_step))


def _one_less(_: Any) -> None:
    def make(before: Any) -> Any:
        def runs(batch: Any) -> Any:
            every = list(before(batch))
            return iter(every[:-1] if len(every) > 1 else every)

        return runs

    _wrap(StepBatch, "runs", make)


def _own_buffers(_: Any) -> None:
    def make(before: Any) -> Any:
        def combine(buffers: Any, changed: Any, *, num_samples: int, groups: Any, counts: bool = True) -> Any:
            return before(buffers, changed, num_samples=buffers._num_captured or num_samples, groups=[], counts=counts)

        return combine

    _wrap(BufferAverager, "combine", make)


def _seeded(change: Callable[[Any, tuple[int, ...]], tuple[int, ...]]) -> Plant:
    def plant(worker: Any) -> None:
        _wrap(random_state, "seed_all", lambda before: lambda *numbers: before(*change(worker, numbers)))

    return plant


def _tied(times: int) -> Plant:
    def make(before: Any) -> Any:
        def add_up(tied: Any, parts: Any) -> None:
            for _ in range(times):
                before(tied, parts)

        return add_up

    return lambda _: _wrap(TiedStageGradients, "add_up", make)


def _alike(_: Any) -> None:
    """Micro-batches count alike in a pipeline, however many samples they have."""

    def make(before: Any) -> Any:
        def init(step: Any, worker: Any, pipeline: Any, forward: Any, micros: Any, weights: Any, seeds: Any) -> None:
            even = [sum(weights) / len(weights)] * len(weights)
            before(step, worker, pipeline, forward, micros, even, seeds)

        return init

    _wrap(stage_worker._PipelineStep, "__init__", make)


def _boundary(name: str, factor: float) -> Plant:
    """What leaves a stage, or the gradient that goes back, is another."""

    def make(before: Any) -> Any:
        return lambda step, action, arrived: {n: one * factor for n, one in before(step, action, arrived).items()}

    return lambda _: _wrap(stage_worker._PipelineStep, name, make)


def _scattered(unit: str, change: Callable[[Tensor], None]) -> Plant:
    def make(before: Any) -> Any:
        def scatter(one: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            work = before(one, output, *args, **kwargs)
            if unit in one._unit:
                if work is not None:
                    work.wait()
                change(output)
            return work

        return scatter

    return lambda _: _wrap(ShardReduceScatter, "__call__", make)


def _own_rows(unit: str) -> Plant:
    """Rows of another worker: the parts are sent in the reverse order."""

    def make(before: Any) -> Any:
        def scatter(one: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            if unit in one._unit:
                given = given.view(2, -1).flip(0).reshape(-1).contiguous()
            return before(one, output, given, *args, **kwargs)

        return scatter

    return lambda _: _wrap(ShardReduceScatter, "__call__", make)


def _stale_gather(unit: str) -> Plant:
    kept: dict[str, Tensor] = {}

    def make(before: Any) -> Any:
        def gather(one: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
            work = before(one, output, given, *args, **kwargs)
            if unit in one._unit:
                if work is not None:
                    work.wait()
                output.copy_(kept.setdefault(one._unit, output.clone()))
            return work

        return gather

    return lambda _: _wrap(ShardAllGather, "__call__", make)


def _router_gradient(_: Any) -> None:
    def make(before: Any) -> Any:
        def dispatch(apply: Any, tokens: Any, weights: Any, **kwargs: Any) -> Any:
            weights = weights * 1.0
            if weights.requires_grad:
                weights.register_hook(lambda gradient: gradient * 0.5)
            return before(apply, tokens, weights, **kwargs)

        return dispatch

    _wrap(expert_apply, "dispatch_tokens", make)


def _token_gradient(_: Any) -> None:
    def make(before: Any) -> Any:
        def dispatch(apply: Any, tokens: Any, weights: Any, **kwargs: Any) -> Any:
            return before(apply, tokens.detach() + (tokens - tokens.detach()) * 0.5, weights, **kwargs)

        return dispatch

    _wrap(expert_apply, "dispatch_tokens", make)


def _other_experts(_: Any) -> None:
    def make(before: Any) -> Any:
        def route(*args: Any, **kwargs: Any) -> Any:
            found = before(*args, **kwargs)
            return dataclasses.replace(found, experts=found.experts.roll(1, 0))

        return route

    _wrap(expert_apply, "route_of", make)


def _steps_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def apply(gradients: Any, optimizers: Any) -> None:
            before(gradients, optimizers)
            before(gradients, optimizers)

        return apply

    _wrap(GradientReducer, "apply", make)


def _clips_twice(_: Any) -> None:
    def make(before: Any) -> Any:
        def clip(gradients: Any, max_norm: float, norm: Any) -> None:
            before(gradients, max_norm, norm)
            before(gradients, max_norm, norm)

        return clip

    _wrap(GradientReducer, "clip", make)


def _forgets_momentum(worker: Any) -> None:
    def make(before: Any) -> Any:
        def apply(gradients: Any, optimizers: Any) -> None:
            before(gradients, optimizers)
            at = dict(zip(gradients.names, gradients.parameters, strict=True))["model.blocks.0.up.weight"]
            if worker.rank == 0:
                optimizers[0].state.pop(at, None)

        return apply

    _wrap(GradientReducer, "apply", make)


def _doubled(output: Tensor) -> None:
    output.mul_(2)


def _halved_gather(_: Any) -> None:
    """The gathered whole has the workers' parts in another order."""

    def gather(tensor: Tensor, group: Any, *, dim: int, sections: Any) -> Tensor:
        take, _, _ = tensor_collectives._moves(group, dim, sections)

        def collect(part: Tensor) -> Tensor:
            return tensor_collectives.gathered(part, group, dim=dim, sections=sections).flip(dim)

        return tensor_collectives._cross(tensor, collect, take)

    tensor_collectives.gather = gather


def _own_part_only(_: Any) -> None:
    """Sequence parallel: backward takes one's part of the gradient, and the others' are lost."""

    def gather_for_group(tensor: Tensor, group: Any, *, dim: int, sections: Any) -> Tensor:
        take, collect, _ = tensor_collectives._moves(group, dim, sections)
        return tensor_collectives._cross(tensor, collect, take)

    tensor_collectives.gather_for_group = gather_for_group


def _lost_rank_gradient(worker: Any, parameters: Any) -> None:
    if worker.rank == 0:
        parameters["model.blocks.1.down.weight"].grad.zero_()


def _dropped(name: str, factor: float) -> Plant:
    def change(worker: Any, parameters: Any) -> None:
        parameters[name].grad.mul_(factor)

    return _after_land(change)


ALL = ("model",)
SPLIT = ("model.words", "model.head", *(f"model.blocks.*.{one}" for one in ("qkv", "up", "down", "out")))
WHOLE = ("model.places", "model.norm", *(f"model.blocks.*.{one}" for one in ("before", "between", "down", "out")))
ROUTED = ("model.blocks.?", "model.blocks.?.experts", "model.blocks.?.experts.*", "model.blocks.?.router")

ERRORS: tuple[PlantedError, ...] = (
    # tensor parallel
    PlantedError(
        what="gradient of a column layer's input is not summed",
        layout="tensor=2",
        plant=_replace(tensor_collectives, "copy_to_group", lambda tensor, group: tensor),
        expected=("model.head",),
    ),
    PlantedError(
        what="partial results are summed and doubled",
        layout="tensor=2",
        plant=_result(tensor_collectives, "total", lambda one: one * 2),
        expected=("model.words",),
    ),
    PlantedError(
        what="a row layer's partial results are not summed",
        layout="tensor=2",
        plant=_not_summed_at("blocks.0.down"),
        expected=("model.blocks.0.down",),
    ),
    PlantedError(
        what="a row layer's bias is dropped",
        layout="tensor=2",
        plant=_row(lambda module, ops, out: out - module.bias, "blocks.1.out"),
        is_early=True,
        expected=("model.blocks.1.out",),
    ),
    PlantedError(
        what="a row layer's bias is added by each worker",
        layout="tensor=2",
        plant=_row(lambda module, ops, out: out + module.bias * (ops.size - 1), "blocks.0.down"),
        is_early=True,
        expected=("model.blocks.0.down",),
    ),
    PlantedError(
        what="wrong slice of a fused qkv",
        layout="tensor=2",
        plant=_fused_as_one,
        is_early=True,
        expected=("model.blocks.0.qkv",),
    ),
    PlantedError(
        what="a worker loads another's part of a weight",
        layout="tensor=2",
        plant=_other_part,
        is_early=True,
        expected=("model.blocks.0.out",),
    ),
    PlantedError(
        what="rows of other workers' vocabulary are not masked",
        layout="tensor=2",
        plant=_unmasked,
        is_early=True,
        expected=("model.words",),
    ),
    PlantedError(
        what="parts are gathered in another order",
        layout="tensor=2",
        plant=_halved_gather,
        expected=("model.head",),
    ),
    PlantedError(
        what="norm leaves out split parameters (Megatron-LM #7452)",
        layout="tensor=2",
        plant=_counted(lambda one, p: one.group.index == 0 and not one.has_part(p)),
        expected=SPLIT,
    ),
    PlantedError(
        what="norm counts whole parameters on each worker",
        layout="tensor=2",
        plant=_counted(lambda one, p: True),
        expected=WHOLE,
    ),
    PlantedError(
        what="norm counts only the first worker's parts",
        layout="tensor=2",
        plant=_counted(lambda one, p: one.group.index == 0),
        expected=SPLIT,
    ),
    PlantedError(
        what="a layer norm's gradient is not summed (Megatron-LM #1446)",
        layout="tensor=2+sequence=true",
        plant=_completed(0),
        expected=WHOLE,
    ),
    PlantedError(
        what="a layer norm's gradient is summed twice",
        layout="tensor=2+sequence=true",
        plant=_completed(2),
        expected=WHOLE,
    ),
    PlantedError(
        what="backward of gathered tokens keeps one worker's gradient",
        layout="tensor=2+sequence=true",
        plant=_own_part_only,
        expected=("model.head",),
    ),
    # context parallel
    PlantedError(
        what="positions begin at 0 on every worker",
        layout="context=2",
        plant=_positions_of_first,
        expected=("model", "model.places"),
    ),
    PlantedError(
        what="the loss of all tokens is not summed",
        layout="context=2",
        plant=_replace(context_collectives, "total", lambda tensor, group: tensor),
        expected=ALL,
    ),
    PlantedError(
        what="gradients are not divided by the workers of a sequence",
        layout="context=2",
        plant=_scaled_land(2.0),
        expected=ALL,
        program=_unclipped_text,
    ),
    PlantedError(
        what="one worker's share of a gradient is lost",
        layout="context=2",
        plant=_dropped("model.blocks.1.between.weight", 0.5),
        expected=("model.blocks.1.between",),
    ),
    # data parallel
    PlantedError(
        what="the loss is divided by the worker's own count",
        layout="replicas=2",
        plant=_scaled_land(2.0),
        expected=ALL,
        program=_unclipped_text,
    ),
    PlantedError(
        what="one worker's losses count twice in the mean",
        layout="replicas=2",
        plant=_own_loss_weight,
        expected=ALL,
    ),
    PlantedError(
        what="the last partial micro-batch counts as a full one",
        layout="replicas=2",
        plant=_full_micro_batches,
        expected=ALL,
    ),
    PlantedError(what="accumulation is off by one", layout="replicas=2", plant=_one_less, expected=ALL),
    PlantedError(
        what="a stale gradient of one parameter",
        layout="replicas=2",
        plant=_stale("model.blocks.1.up.weight"),
        expected=("model.blocks.1.up",),
    ),
    PlantedError(
        what="a gradient of the first worker is lost",
        layout="replicas=2",
        plant=_after_land(_lost_rank_gradient),
        expected=("model.blocks.1.down",),
    ),
    PlantedError(
        what="gradients are summed in bfloat16",
        layout="replicas=2",
        plant=_after_land(_in_bf16),
        expected=ALL,
    ),
    PlantedError(
        what="buffers of one worker only",
        layout="replicas=2",
        plant=_own_buffers,
        expected=("model.norm",),
        program=_normed,
    ),
    PlantedError(
        what="all micro-batches share one random state",
        layout="replicas=2",
        plant=_seeded(lambda _, numbers: numbers[:-1]),
        expected=("model.drop",),
        program=_normed,
    ),
    PlantedError(
        what="random state is split by worker",
        layout="replicas=2",
        plant=_seeded(lambda worker, numbers: (*numbers, worker.rank)),
        expected=("model.drop",),
        program=_normed,
    ),
    PlantedError(what="the optimizer steps twice", layout="replicas=2", plant=_steps_twice, expected=ALL),
    PlantedError(what="gradients are clipped twice", layout="replicas=2", plant=_clips_twice, expected=ALL),
    PlantedError(
        what="momentum of one parameter is lost",
        layout="replicas=2",
        plant=_forgets_momentum,
        expected=("model.blocks.0.up",),
    ),
    PlantedError(
        what="weights are not made equal at the start",
        layout="tensor=2",
        is_early=True,
        plant=_replace(model_layout, "send_from_first", lambda tensors, group: None),
        expected=("model*",),
        program=_unequal_text,
        reference=_text,
    ),
    # fully sharded
    PlantedError(
        what="the sum of a unit's rows is doubled",
        layout="shard=2",
        plant=_scattered("blocks.1", _doubled),
        expected=("model.blocks.1", "model.blocks.1.*"),
    ),
    PlantedError(
        what="rows are scattered over the wrong group",
        layout="shard=2",
        plant=_own_rows("blocks.0"),
        expected=("model.blocks.0", "model.blocks.0.*"),
    ),
    PlantedError(
        what="a stale gather of a unit's weights",
        layout="shard=2",
        plant=_stale_gather("blocks.1"),
        expected=("model.blocks.1", "model.blocks.1.*"),
    ),
    PlantedError(
        what="norm of each worker's own rows",
        layout="shard=2",
        plant=_replace(GradientNorm, "_other_parts", lambda _: []),
        expected=ALL,
    ),
    PlantedError(
        what="gradients of rows are not divided by the count",
        layout="shard=2+zero=1",
        plant=_scaled_land(0.5),
        expected=ALL,
        program=_unclipped_text,
    ),
    # pipeline parallel
    PlantedError(
        what="tied weights' gradients are summed twice",
        layout="stages=2",
        plant=_tied(2),
        expected=("model.words", "model.head"),
    ),
    PlantedError(
        what="tied weights' gradients are not summed",
        layout="stages=2",
        plant=_tied(0),
        expected=("model.words", "model.head"),
    ),
    PlantedError(
        what="micro-batches of all sizes count alike",
        layout="stages=2",
        plant=_alike,
        expected=ALL,
    ),
    PlantedError(
        what="what a stage sends is scaled",
        layout="stages=2",
        plant=_boundary("_do_forward", 1.01),
        expected=("model.blocks.0", "model.blocks.1", "model.blocks.1.before"),
    ),
    PlantedError(
        what="the gradient that a stage sends back is scaled",
        layout="stages=2",
        plant=_boundary("_do_backward", 1.01),
        expected=("model.blocks.0", "model.blocks.1"),
    ),
    PlantedError(
        what="norm leaves out another stage's parameters",
        layout="stages=2",
        plant=_replace(GradientNorm, "_other_parts", lambda _: []),
        expected=("model", "model.words", "model.blocks.*", "model.norm"),
    ),
    # expert parallel
    PlantedError(
        what="wrong gradient of a router (transformers #48687)",
        layout="experts=2",
        plant=_router_gradient,
        expected=ROUTED,
        program=_mixture,
    ),
    PlantedError(
        what="gradients of routed tokens are lost in part",
        layout="experts=2",
        plant=_token_gradient,
        expected=(*ROUTED, "model.blocks.?.norm"),
        program=_mixture,
    ),
    PlantedError(
        what="tokens meet other experts",
        layout="experts=2",
        plant=_other_experts,
        expected=ROUTED,
        program=_mixture,
    ),
    PlantedError(
        what="norm leaves out experts' parameters (Megatron-LM #5916)",
        layout="experts=2",
        plant=_counted(lambda one, p: one.group.index == 0 and not one.has_part(p)),
        expected=ROUTED,
        program=_mixture,
    ),
    PlantedError(
        what="gradients of experts are divided once more",
        layout="experts=2",
        plant=_dropped("model.blocks.1.experts.up", 0.5),
        expected=("model.blocks.1.experts",),
        program=_mixture,
    ),
)

FAST = (
    "a row layer's bias is dropped",
    "a stale gradient of one parameter",
    "norm leaves out split parameters (Megatron-LM #7452)",
)


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What parity said of an error."""

    error: PlantedError
    is_caught: bool
    departure: Departure | None
    failure: str = ""

    @property
    def is_placed(self) -> bool:
        named = self.departure.module if self.departure is not None else ""
        return self.is_caught and any(fnmatch.fnmatchcase(named, one) for one in self.error.expected)


class Trials:
    """Runs planted errors; the reference of a program runs once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._references: dict[Any, tuple[Path, Path]] = {}

    def __call__(self, error: PlantedError) -> Outcome:
        """Run the configuration with the error, and judge it as the command does."""
        program = error.reference or error.program
        if program not in self._references:
            self._references[program] = (
                self._run(f"{program.__name__}_reference", program, 1, "replicas=1"),
                self._run(f"{program.__name__}_perturbed", program, 1, "replicas=1", perturbed=True),
            )
        reference, perturbed = self._references[program]

        def planted(worker: Any) -> None:
            if error.is_early:
                error.plant(worker)
            else:
                _wrap(type(worker), "batches", lambda before: lambda *a, **k: (error.plant(worker), before(*a, **k))[1])
            error.program(worker)

        try:
            captured = self._run("planted", planted, error.workers, error.layout)
        except WorkersFailed as failure:
            return Outcome(error=error, is_caught=False, departure=None, failure=str(failure).strip().splitlines()[-1])
        verdict = ParityVerdict(
            workers=error.workers,
            plan=_plan(error.layout),
            device="cpu",
            reference_device="cpu",
            tolerance=Tolerance.of(None, precision="fp32"),
            found=compare(CaptureReader(captured), CaptureReader(reference)),
        )
        departure = None if verdict.holds else locate(captured, reference, perturbed, steps=STEPS)
        return Outcome(error=error, is_caught=not verdict.holds, departure=departure)

    def _run(self, name: str, program: Any, workers: int, layout: str, *, perturbed: bool = False) -> Path:
        place = self._directory / name
        shutil.rmtree(place, ignore_errors=True)
        captured = place / "captured"
        ask_for_modules(captured, steps=STEPS, perturbed=perturbed)
        World(place)(program, workers, _plan(layout), capture_dir=str(captured), max_steps=STEPS)
        from paceline.cli.parity import module_records

        module_records._file.cache_clear()
        module_records._step.cache_clear()
        return captured


def _plan(layout: str) -> Plan:
    return Plan(layout=Plan.parse(layout).layout, batch=Batch(size=8, micro=3))


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of all errors, as the reference page has it, and how many were caught and placed."""
    rows = ["| error | plan | caught | named | phase |", "|---|---|---|---|---|"]
    for one in outcomes:
        named = one.failure or "nothing" if one.departure is None else f"`{one.departure.module}`"
        right = "" if one.is_placed else f" (expected `{one.error.expected[0]}`)"
        phase = "" if one.departure is None else f"{one.departure.phase}, step {one.departure.step}"
        caught = "yes" if one.is_caught else "no"
        rows.append(f"| {one.error.what} | `{one.error.layout}` | {caught} | {named}{right} | {phase} |")
    num_caught, num_placed = sum(one.is_caught for one in outcomes), sum(one.is_placed for one in outcomes)
    rows.append(f"\n{num_caught} of {len(outcomes)} errors are caught, {num_placed} are placed in the right module.")
    return "\n".join(rows)
