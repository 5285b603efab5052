"""Verify a split before it is used: a block on random weights must compute the same whole and on emulated workers.

Outputs and the gradients of every input and parameter are compared. A wrong guess about a block, or an operation with a
wrong rule, therefore leads to a refusal and never to another loss. Blocks of one class with the same sizes are verified
once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.plan import ParameterSplit
from paceline.parallel.tensor.random_weights import RandomWeights
from paceline.parallel.tensor.split_tensor import TensorGroupOps, mapped

__all__ = ["captured", "disagreement"]

ERRORS = (RuntimeError, TypeError, ValueError, PlanError, AttributeError)
GRADIENT = "the gradient of"
MOST_IN_DOUBLE = 1 << 24  # numbers of the largest parameter: larger ones take a while, and memory
PIECE = 1 << 22  # numbers that are compared at a time
TOLERANCE = 1e-4  # a wrong split is off by the numbers' own size; blocks that compute partly in fp32 are off by 1e-7


def captured(model: nn.Module, sample: SampleInput, names: Sequence[str]) -> dict[str, SampleInput]:
    """Return the arguments of the first call of each named module when the model runs on `sample`."""
    calls: dict[str, SampleInput] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in calls:
                calls[name] = SampleInput(args=copy.deepcopy(args), kwargs=copy.deepcopy(kwargs))

        return hook

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(note(name), with_kwargs=True) for name in names]
    try:
        with torch.no_grad():  # tensors with a graph cannot be copied
            sample.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def disagreement(
    block: nn.Module,
    layers: Sequence[Layer],
    call: SampleInput,
    *,
    size: int,
    sequence: bool,
    verified: Collection[nn.Module] = (),
) -> str | None:
    """Return how `size` emulated workers differ from the whole block, in words; None where they agree.

    verified: blocks inside, whose own gradients are known to agree. They are run, and get none.
    """
    frozen = _only_inside(block, verified)
    why: str | None = None
    try:
        for overlap in (True, False):
            try:
                weights, reference = _reference(block, call, frozen, overlap=overlap)
                why = _difference(weights, reference, layers, call, size=size, sequence=sequence)
            except ERRORS:  # it may write to its parameters
                if overlap:
                    continue
                raise
            if not weights.is_written:
                break
        return why
    except ERRORS as error:
        lines = str(error).strip().splitlines()
        return f"it cannot be tried: {type(error).__name__}: {lines[0] if lines else ''}"


def _only_inside(block: nn.Module, verified: Collection[nn.Module]) -> set[int]:
    """Return the ids of parameters of `block` that only modules within `verified` have."""
    inside = {id(module) for one in verified for module in one.modules()}
    outside = {
        id(parameter)
        for module in block.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    return {id(parameter) for one in verified for parameter in one.parameters()} - outside


def _reference(
    block: nn.Module, call: SampleInput, frozen: Collection[int], *, overlap: bool
) -> tuple[RandomWeights, _BlockResult]:
    """Return random weights, in double precision where that is possible and small, and what the whole block computes
    with them."""
    largest = max((one.numel() for one in block.parameters()), default=0)
    if largest <= MOST_IN_DOUBLE:
        weights = RandomWeights(block, torch.float64, frozen=frozen, overlap=overlap)
        with contextlib.suppress(RuntimeError):  # some kernels have no double precision
            return weights, _run(weights.whole, call, None)
        del weights
    weights = RandomWeights(block, torch.float32, frozen=frozen, overlap=overlap)
    return weights, _run(weights.whole, call, None)


def _difference(
    weights: RandomWeights,
    reference: _BlockResult,
    layers: Sequence[Layer],
    call: SampleInput,
    *,
    size: int,
    sequence: bool,
) -> str | None:
    """Return how emulated workers with these weights differ from `reference`; None where they agree."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plan itself lists operations that gather
        # Threads share the generator, so it is restored here and not in each of them.
        parts = emulate(size, lambda group: _run_part(weights.copy(), layers, call, group, sequence))
    for what, expected in reference.all():
        scale = max((_size(one) for one in expected.values() if one.numel()), default=0.0)
        for name, value in expected.items():
            for index, (result, splits) in enumerate(parts):
                found = dict(result.all())[what].get(name)
                own = splits[name].part(value, index) if what == GRADIENT and name in splits else value
                if found is None or found.shape != own.shape:
                    return f"{what} {name}: worker {index} has {None if found is None else tuple(found.shape)}"
                if own.numel() and not (gap := _gap(found, own)) <= TOLERANCE * scale:
                    return f"{what} {name} of worker {index} is off by {gap / (scale or 1.0):.1e} of the largest"
    return None


def _size(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, float("inf")))


def _gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors of one shape; NaN if there is one. Large tensors go row by row."""
    if found.ndim < 2 or found.numel() <= PIECE:
        return _size(found - expected)
    rows = max(1, PIECE * len(found) // found.numel())
    gaps = [_size(a - b) for a, b in zip(found.split(rows), expected.split(rows), strict=True)]
    return float(torch.tensor(gaps).max())  # Python's `max` may pass over a NaN


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BlockResult:
    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]

    def all(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [
            ("output", self.outputs),
            ("the gradient of input", self.inputs),
            (GRADIENT, self.parameters),
        ]


def _run_part(
    part: nn.Module, layers: Sequence[Layer], call: SampleInput, group: EmulatedGroup, sequence: bool
) -> tuple[_BlockResult, dict[str, ParameterSplit]]:
    ops = TensorGroupOps(group, rules=rule_of, sequence=sequence)
    splits = split_layers(part, layers, ops, copies=False)
    try:
        return _run(part, call, ops), splits
    finally:
        for module in part.modules():  # by its new forward it refers to itself, and would live on
            vars(module).pop("forward", None)


def _run(block: nn.Module, call: SampleInput, ops: TensorGroupOps | None) -> _BlockResult:
    inputs: dict[str, Tensor] = {}
    dtype = next((one.dtype for one in block.parameters() if one.is_floating_point()), torch.float64)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        one = value.detach().clone()
        if one.is_floating_point():
            one = one.to(dtype).requires_grad_()
            inputs[str(len(inputs))] = one
        return one

    args, kwargs = mapped(copy.deepcopy(call.args), own), mapped(copy.deepcopy(dict(call.kwargs)), own)
    with torch.enable_grad():
        result = block(*args, **kwargs)
        outputs = {str(index): one for index, one in enumerate(_tensors(result, ops))}
        loss = torch.zeros((), dtype=torch.float64)
        for index, one in outputs.items():
            if one.requires_grad:
                generator = torch.Generator().manual_seed(int(index))
                loss = loss + (one * torch.randn(one.shape, generator=generator, dtype=torch.float64)).sum()
        if loss.requires_grad:
            loss.backward()
    gradients = ((name, one.grad) for name, one in block.named_parameters() if one.grad is not None)
    parameters = {name: one.to_dense() if one.is_sparse else one for name, one in gradients}
    return _BlockResult(
        outputs={name: one.detach() for name, one in outputs.items()},
        inputs={name: one.grad for name, one in inputs.items() if one.grad is not None},
        parameters=parameters,
    )


def _tensors(value: Any, ops: TensorGroupOps | None) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a result, whole."""
    if isinstance(value, Tensor):
        whole = value if ops is None else ops.plain(value)
        if whole.is_floating_point():
            yield whole
    elif isinstance(value, (Mapping, tuple, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, ops)
