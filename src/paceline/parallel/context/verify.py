"""Verify a plan before it is used: a copy of the model in double precision must compute the same whole and on emulated
workers.

All outputs and the gradients of all parameters are compared. A wrong guess about a model, or an operation with a wrong
rule, therefore leads to a refusal and never to another loss. The trial also shows what the plan does: which attentions
are shared, and which operations need all tokens. Where the model is also tensor parallel, both are tried together.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError, SyncError
from paceline.parallel.context.apply import install
from paceline.parallel.context.collectives import ContextCollectives, EmulatedContextCollectives
from paceline.parallel.context.group_ops import AttentionKind, ContextGroupOps
from paceline.parallel.context.op_rules import rule_of
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.dry_run import gather_inputs
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate_grid
from paceline.parallel.tensor.op_rules import rule_of as tensor_rule_of
from paceline.parallel.tensor.plan import ParameterSplit, TensorPlan
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

__all__ = ["ContextTrial", "GatheredOperation", "SharedAttention", "WholeModelRun", "run_whole", "try_plan"]

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
    """A copy of the model for trials, and what it computes whole."""

    model: nn.Module
    samples: tuple[SampleInput, ...]
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


def run_whole(model: nn.Module, samples: Sequence[SampleInput]) -> WholeModelRun:
    """Return a copy of `model` with random weights, its outputs on `samples`, and the gradients of their sum.

    With its gradients and those of a trial it takes the memory of three models in double precision. Raises PlanError
    where the model cannot be run so.
    """
    trial_model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trial_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.5 * noise)
            parameter.grad = None
    try:
        outputs = _run(_copy_sharing_parameters(trial_model), samples)
    except RuntimeError:  # some kernels have no double precision
        trial_model = trial_model.float()
        try:
            outputs = _run(_copy_sharing_parameters(trial_model), samples)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            lines = str(error).strip().splitlines()
            raise PlanError(
                f"{type(model).__name__} has to be tried in double or single precision before its sequence is split, "
                f"and cannot be run so on {samples[0]} ({type(error).__name__}: {lines[0] if lines else ''}). Pass a "
                "sample of your own, sample=(x,), or use attention that runs in any precision (in transformers, "
                "attn_implementation='sdpa')."
            ) from error
    return WholeModelRun(
        model=trial_model, samples=tuple(samples), outputs=outputs, gradients=_taken_gradients(trial_model)
    )


def try_plan(reference: WholeModelRun, plan: ContextPlan, layers: TensorPlan | None = None) -> ContextTrial:
    """Return what `plan` does on the samples, and whether it computes what the whole model does.

    `layers`: the model's tensor parallel plan. Each emulated worker then has its part of another copy of the model.
    """

    def work(context_parallel_group: EmulatedGroup, tensor_parallel_group: EmulatedGroup) -> _EmulatedRun:
        ops = _RecordingOps(EmulatedContextCollectives(context_parallel_group), kind=plan.kind)
        part = _copy_sharing_parameters(reference.model) if layers is None else copy.deepcopy(reference.model)
        splits: dict[str, ParameterSplit] = {}
        if layers is not None:
            features = TensorGroupOps(tensor_parallel_group, rules=tensor_rule_of)
            splits = split_layers(part, layers.layers, features)
            for name in layers.gathered:
                gather_inputs(part.get_submodule(name))
            TensorContextOps(features, ops)
        install(part, plan, ops)
        for name, module in part.named_modules():
            ops.note_runs(name, module)
        outputs = _run(part, reference.samples)
        gradients: dict[str, Tensor] = {}
        for name, grad in _taken_gradients(part).items() if layers is not None else ():
            gradients[name] = splits[name].gathered(grad, tensor_parallel_group) if name in splits else grad
        return _EmulatedRun(ops=ops, outputs=outputs, gradients=gradients)

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = emulate_grid(plan.size, 1 if layers is None else layers.size, work)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, CannotSplit, SyncError) as error:
        _taken_gradients(reference.model)
        lines = str(error).strip().splitlines()
        why = f"it cannot be tried: {type(error).__name__}: {lines[0] if lines else ''}"
        return ContextTrial(disagreement=why, attentions=(), lost=())
    why = None
    if layers is None:
        gradients = _taken_gradients(reference.model)  # the sum over workers, because they share the parameters
        means = {name: one.div_(plan.size) for name, one in gradients.items()}
        why = _difference("the gradient of", reference.gradients, means)
    for column in zip(*found, strict=True) if layers is not None else ():
        why = why or _difference("the gradient of", reference.gradients, _means([one.gradients for one in column]))
    for one in (one for row in found for one in row):
        why = _difference("output", reference.outputs, one.outputs) or why
    ops = found[0][0].ops
    return ContextTrial(disagreement=why, attentions=tuple(ops.attentions), lost=tuple(ops.lost))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _EmulatedRun:
    """What one emulated worker has. `gradients` are whole, and kept only where it has parameters of its own."""

    ops: _RecordingOps
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _means(workers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each gradient over the workers; some may not have used the parameter."""
    names = dict.fromkeys(name for one in workers for name in one)
    own = {name: [one[name] for one in workers if name in one] for name in names}
    return {name: torch.stack(some).sum(0) / len(workers) for name, some in own.items()}


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


def _copy_sharing_parameters(model: nn.Module) -> nn.Module:
    """Return a copy with its own modules and buffers, and the same parameters."""
    return copy.deepcopy(model, {id(one): one for one in model.parameters()})


def _run(model: nn.Module, samples: Sequence[SampleInput]) -> dict[str, Tensor]:
    """Return floating-point outputs, whole; leaves the gradients of a random sum of them in the parameters."""
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float64)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(dtype) if value.is_floating_point() else value.detach().clone()

    outputs: dict[str, Tensor] = {}
    loss = torch.zeros((), dtype=torch.float64)
    with torch.enable_grad():
        for sample in samples:
            args, kwargs = mapped(copy.deepcopy(sample.args), own), mapped(copy.deepcopy(dict(sample.kwargs)), own)
            for one in _tensors(model(*args, **kwargs)):
                if one.requires_grad:
                    generator = torch.Generator().manual_seed(len(outputs))
                    weights = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one.device)
                    loss = loss + (one * weights).sum().cpu()
                outputs[str(len(outputs))] = one.detach()
        loss.backward()
    return outputs


def _taken_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters and clear them."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def _difference(what: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    if expected.keys() != found.keys():
        return f"{what} {', '.join(sorted(expected.keys() ^ found.keys())[:3])} is present in only one of the two"
    scale = max((float(one.abs().max()) for one in expected.values() if one.numel()), default=0.0)
    for name, value in expected.items():
        other = found[name]
        if other.shape != value.shape:
            return f"{what} {name} is {tuple(other.shape)}, not {tuple(value.shape)}"
        off = float((other - value).abs().max()) if value.numel() else 0.0
        if not off <= TOLERANCE * scale:
            return f"{what} {name} is off by {off / (scale or 1.0):.1e} of the largest"
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a result, whole."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield whole(value)
    elif isinstance(value, (Mapping, tuple, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
