"""Verify a plan before it is used: a copy of the model on random weights must compute the same whole and on emulated
workers.

All outputs and the gradients of all parameters are compared. A wrong guess about a model, or an operation with a wrong
rule, therefore leads to a refusal and never to another loss. The trial also shows what the plan does: which attentions
are shared, and which operations need all tokens. Where the model is also tensor parallel, both are tried together.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import SyncError
from paceline.host_memory import give_back_freed
from paceline.parallel.context.apply import install
from paceline.parallel.context.collectives import ContextCollectives, EmulatedContextCollectives
from paceline.parallel.context.group_ops import AttentionKind, ContextGroupOps
from paceline.parallel.context.op_rules import rule_of
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.dry_run import gather_inputs
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate_grid
from paceline.parallel.tensor.gradient_sketch import GradientSketch, sketched_gradients
from paceline.parallel.tensor.op_rules import rule_of as tensor_rule_of
from paceline.parallel.tensor.plan import ParameterSplit, TensorPlan
from paceline.parallel.tensor.random_weights import RandomWeights
from paceline.parallel.tensor.split_shapes import CannotSplit
from paceline.parallel.tensor.split_tensor import (
    SplitTensor,
    TensorGroupOps,
    is_in_place,
    mapped,
    name_of,
    on_parts,
    whole,
)
from paceline.parallel.tensor.tensor_context_ops import TensorContextOps

__all__ = [
    "USER_ERRORS",
    "ContextTrial",
    "GatheredOperation",
    "SharedAttention",
    "WholeModelRun",
    "run_whole",
    "try_plan",
]

USER_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
TOLERANCE = 1e-4  # a wrong slice is off by the numbers' own size; models that compute partly in fp32 are off by 1e-7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GatheredOperation:
    """An operation for which tokens were gathered: its name, why, and the modules around it, outermost first."""

    operation: str
    why: str
    modules: tuple[str, ...]
    is_refused: bool  # it changes a slice in place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedAttention:
    """An attention that was shared: how, its number of queries, and the modules around it."""

    kind: str
    length: int
    modules: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContextTrial:
    """What the emulated workers have shown."""

    disagreement: str | None  # None: they agree with the whole model
    attentions: tuple[SharedAttention, ...]
    lost: tuple[GatheredOperation, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeModelRun:
    """A model's random weights for trials, and what it computes with them whole."""

    weights: RandomWeights
    samples: tuple[SampleInput, ...]
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, GradientSketch]


def run_whole(model: nn.Module, samples: Sequence[SampleInput], dtype: torch.dtype) -> WholeModelRun:
    """Return random weights of a type for `model`, its outputs on `samples`, and the gradients of their sum; raises
    what the model raises."""
    frozen = {id(one) for one in model.parameters() if not one.requires_grad}
    for overlap in (True, False):
        weights = RandomWeights(model, dtype, frozen=frozen, overlap=overlap)
        try:
            outputs, gradients = _run(weights.copy(), samples)
        except RuntimeError:  # it may write to its parameters
            if overlap:
                continue
            raise
        finally:
            give_back_freed()
        if not weights.is_written:
            break
    return WholeModelRun(weights=weights, samples=tuple(samples), outputs=outputs, gradients=gradients)


def try_plan(reference: WholeModelRun, plan: ContextPlan, layers: TensorPlan | None = None) -> ContextTrial:
    """Return what `plan` does on the samples, and whether it computes what the whole model does.

    `layers`: the model's tensor parallel plan. Each emulated worker then has its part of the weights.
    """

    def work(context_parallel_group: EmulatedGroup, tensor_parallel_group: EmulatedGroup) -> _EmulatedRun:
        ops = _RecordingOps(EmulatedContextCollectives(context_parallel_group), kind=plan.kind)
        part = reference.weights.copy()
        splits: dict[str, ParameterSplit] = {}
        if layers is not None:
            features = TensorGroupOps(tensor_parallel_group, rules=tensor_rule_of)
            splits = split_layers(part, layers.layers, features, copies=False)
            for name in layers.gathered:
                gather_inputs(part.get_submodule(name))
            TensorContextOps(features, ops)
        install(part, plan, ops)
        for name, module in part.named_modules():
            ops.note_runs(name, module)
        try:
            outputs, gradients = _run(part, reference.samples)
        finally:
            for module in part.modules():  # by its new forward it refers to itself, and would live on
                vars(module).pop("forward", None)
        return _EmulatedRun(ops=ops, outputs=outputs, gradients=gradients, splits=splits)

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = emulate_grid(plan.size, 1 if layers is None else layers.size, work)
    except (*USER_ERRORS, CannotSplit, SyncError) as error:
        lines = str(error).strip().splitlines()
        why = f"it cannot be tried: {type(error).__name__}: {lines[0] if lines else ''}"
        return ContextTrial(disagreement=why, attentions=(), lost=())
    finally:
        give_back_freed()  # of each emulated worker's thread the C library keeps what it had
    why = None
    for index, column in enumerate(zip(*found, strict=True)):
        why = why or _gradients_differ(reference.gradients, column, index)
    for one in (one for row in found for one in row):
        why = _outputs_differ(reference.outputs, one.outputs) or why
    ops = found[0][0].ops
    return ContextTrial(disagreement=why, attentions=tuple(ops.attentions), lost=tuple(ops.lost))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _EmulatedRun:
    """What one emulated worker has."""

    ops: _RecordingOps
    outputs: dict[str, Tensor]
    gradients: dict[str, GradientSketch]
    splits: dict[str, ParameterSplit]  # of its parameters that are parts


class _RecordingOps(ContextGroupOps):
    """One emulated worker's operations, which record what rules tell."""

    def __init__(self, group: ContextCollectives, *, kind: AttentionKind) -> None:
        super().__init__(group, rules=rule_of, kind=kind)
        self.attentions: list[SharedAttention] = []
        self.lost: list[GatheredOperation] = []
        self._running: list[str] = []  # names of modules, outermost first

    def note_runs(self, name: str, module: nn.Module) -> None:
        """Record when a module runs."""

        def leave(*_: Any) -> None:
            self._running.pop()

        module.register_forward_pre_hook(lambda *_: self._running.append(name), prepend=True)
        module.register_forward_hook(leave)

    def attended(self, kind: str, length: int) -> None:
        self.attentions.append(SharedAttention(kind=kind, length=length, modules=tuple(self._running)))

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        is_refused = is_in_place(func) and isinstance(args[0], SplitTensor)
        what = name_of(func)
        why = str(self.in_place_refusal(func, args[0], reason)) if is_refused else str(reason)
        self.lost.append(
            GatheredOperation(operation=what, why=why, modules=tuple(self._running), is_refused=is_refused)
        )

        def gathered(value: Any) -> Any:
            return self.gather(value) if isinstance(value, SplitTensor) else value

        with on_parts():
            return func(*mapped(args, gathered), **mapped(kwargs, gathered))


def _run(model: nn.Module, samples: Sequence[SampleInput]) -> tuple[dict[str, Tensor], dict[str, GradientSketch]]:
    """Return floating-point outputs, whole, and the gradients of a random sum of them."""
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float64)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(dtype) if value.is_floating_point() else value.detach().clone()

    outputs: dict[str, Tensor] = {}
    gradients = sketched_gradients(model)
    with torch.enable_grad():
        for sample in samples:  # one by one: a common backward would hold one sample's gradients until the other's come
            loss = torch.zeros((), dtype=torch.float64)
            args, kwargs = mapped(copy.deepcopy(sample.args), own), mapped(copy.deepcopy(dict(sample.kwargs)), own)
            for one in _tensors(model(*args, **kwargs)):
                if one.requires_grad:
                    generator = torch.Generator().manual_seed(len(outputs))
                    weights = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.device)
                    loss = loss + (one * weights).sum().cpu()
                outputs[str(len(outputs))] = one.detach()
            loss.backward()
    return outputs, gradients


def _gradients_differ(
    expected: Mapping[str, GradientSketch], workers: Sequence[_EmulatedRun], index: int
) -> str | None:
    """Compare the mean over workers with slices, each of which has the gradients of whole outputs. `index`: which part
    of split parameters they have."""
    found: dict[str, GradientSketch] = {}
    for worker in workers:
        for name, one in worker.gradients.items():
            found[name] = found[name] + one if name in found else one
    what = "the gradient of"
    if expected.keys() != found.keys():
        return f"{what} {_some(expected.keys() ^ found.keys())} is present in only one of the two"
    scale = max((_size(one) for each in expected.values() for one in each.sums), default=0.0)
    for name, whole_one in expected.items():
        split, mean = workers[0].splits.get(name), found[name].over(len(workers))
        shape = whole_one.shape if split is None else split.part_shape(index)
        if mean.shape != shape:
            return f"{what} {name} is {mean.shape}, not {shape}"
        place = (None, ()) if split is None else (split.dim, split.ranges(index))
        for a, b in mean.pairs(whole_one, *place):
            if not (off := _size(a - b)) <= TOLERANCE * scale:
                return f"{what} {name} is off by {off / (scale or 1.0):.1e} of the largest"
    return None


def _outputs_differ(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    if expected.keys() != found.keys():
        return f"output {_some(expected.keys() ^ found.keys())} is present in only one of the two"
    scale = max(map(_size, expected.values()), default=0.0)
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape:
            return f"output {name} is {tuple(other.shape)}, not {tuple(value.shape)}"
        if not (off := _size(other - value)) <= TOLERANCE * scale:
            return f"output {name} is off by {off / (scale or 1.0):.1e} of the largest"
    return None


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:3])


def _size(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a result, whole."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield whole(value)
    elif isinstance(value, (Mapping, tuple, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
