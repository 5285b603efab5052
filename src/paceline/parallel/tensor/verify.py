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
from paceline.host_memory import give_back_freed
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.fewer_rows import with_fewer_rows
from paceline.parallel.tensor.gradient_sketch import GradientSketch, sketched_gradients
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.plan import ParameterSplit
from paceline.parallel.tensor.random_weights import RandomWeights
from paceline.parallel.tensor.split_tensor import TensorGroupOps, mapped
from paceline.parallel.trial_types import is_large, types_to_try

__all__ = ["call_of", "disagreement"]

ERRORS = (RuntimeError, TypeError, ValueError, PlanError, AttributeError)
GRADIENT = "the gradient of"
MOST_IN_DOUBLE = 1 << 24  # numbers of the largest parameter: larger ones are tried in single precision only
PIECE = 1 << 22  # numbers that are compared at a time
TOLERANCE = 1e-4  # a wrong split is off by the numbers' own size; blocks that compute partly in fp32 are off by 1e-7


def call_of(name: str, model: nn.Module, sample: SampleInput) -> SampleInput | None:
    """Return the arguments of the first call of a module when the model runs on `sample`; None if it does not call it.

    The forward ends there.
    """
    found: list[SampleInput] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(SampleInput(args=copy.deepcopy(args), kwargs=copy.deepcopy(kwargs)))
        raise _Reached

    handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad(), contextlib.suppress(_Reached):  # tensors with a graph cannot be copied
            sample.run(model)
    finally:
        handle.remove()
    return found[0] if found else None


class _Reached(BaseException):
    """Ends a forward of the model; no code of users takes it for an error."""


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
    block, layers, call = with_fewer_rows(block, layers, call, size=size)
    frozen = _only_inside(block, verified)
    trial = _BlockTrial(layers=layers, call=call, size=size, sequence=sequence)
    failed = ""
    for dtype in _dtypes(block):
        try:
            why = trial.run(block, dtype, frozen)
        except ERRORS as error:
            lines = str(error).strip().splitlines()
            failed = failed or f"it cannot be tried: {type(error).__name__}: {lines[0] if lines else ''}"
            continue  # some kernels have no double precision
        finally:
            give_back_freed()
        if why is None or dtype is torch.float64:
            return why
        failed = why
    return failed


def _dtypes(block: nn.Module) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if is_large(block, MOST_IN_DOUBLE) else types_to_try(block)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BlockTrial:
    """What a block is tried with."""

    layers: Sequence[Layer]
    call: SampleInput
    size: int
    sequence: bool

    def run(self, block: nn.Module, dtype: torch.dtype, frozen: Collection[int]) -> str | None:
        """Return how workers differ from the whole on random weights of `dtype`; raises what the block raises."""
        for overlap in (True, False):
            try:
                weights = RandomWeights(block, dtype, frozen=frozen, overlap=overlap)
                why = self._difference(weights, _run(weights.whole, self.call, None))
            except ERRORS:  # it may write to its parameters
                if overlap:
                    continue
                raise
            if not weights.is_written:
                break
        return why

    def _difference(self, weights: RandomWeights, reference: _BlockResult) -> str | None:
        """Return how emulated workers with these weights differ from `reference`; None where they agree."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan itself lists operations that gather
            # Threads share the generator, so it is restored here and not in each of them.
            parts = emulate(self.size, lambda group: self._run_part(weights.copy(), group))
        for what in ("output", "the gradient of input"):
            if why := _tensors_differ(what, reference, [result for result, _ in parts]):
                return why
        return _gradients_differ(reference, parts)

    def _run_part(self, part: nn.Module, group: EmulatedGroup) -> tuple[_BlockResult, dict[str, ParameterSplit]]:
        ops = TensorGroupOps(group, rules=rule_of, sequence=self.sequence)
        splits = split_layers(part, self.layers, ops, copies=False)
        try:
            return _run(part, self.call, ops), splits
        finally:
            for module in part.modules():  # by its new forward it refers to itself, and would live on
                vars(module).pop("forward", None)


def _tensors_differ(what: str, reference: _BlockResult, results: Sequence[_BlockResult]) -> str | None:
    wholes = reference.tensors(what)
    scale = max((_size(one) for one in wholes.values() if one.numel()), default=0.0)
    for name, own in wholes.items():
        for index, result in enumerate(results):
            found = result.tensors(what).get(name)
            if found is None or found.shape != own.shape:
                return _of_another_shape(f"{what} {name}", index, found)
            if own.numel() and not (gap := _gap(found, own)) <= TOLERANCE * scale:
                return f"{what} {name} of worker {index} is off by {gap / (scale or 1.0):.1e} of the largest"
    return None


def _gradients_differ(
    reference: _BlockResult, parts: Sequence[tuple[_BlockResult, Mapping[str, ParameterSplit]]]
) -> str | None:
    sums = [one for each in reference.gradients.values() for one in each.sums]
    scale = max((_size(one) for one in sums if one.numel()), default=0.0)
    for name, whole in reference.gradients.items():
        for index, (result, splits) in enumerate(parts):
            found, split = result.gradients.get(name), splits.get(name)
            shape = whole.shape if split is None else split.part_shape(index)
            if found is None or found.shape != shape:
                return _of_another_shape(f"{GRADIENT} {name}", index, found)
            pairs = found.pairs(whole, *((None, ()) if split is None else (split.dim, split.ranges(index))))
            gap = float(torch.tensor([_size(a - b) for a, b in pairs if a.numel()] or [0.0]).max())  # NaN stays
            if not gap <= TOLERANCE * scale:
                return f"{GRADIENT} {name} of worker {index} is off by {gap / (scale or 1.0):.1e} of the largest"
    return None


def _of_another_shape(what: str, index: int, found: Tensor | GradientSketch | None) -> str:
    return f"{what}: worker {index} has {None if found is None else tuple(found.shape)}"


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
    gradients: dict[str, GradientSketch]  # of parameters

    def tensors(self, what: str) -> dict[str, Tensor]:
        return self.outputs if what == "output" else self.inputs


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

    gradients = sketched_gradients(block)
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
    return _BlockResult(
        outputs={name: one.detach() for name, one in outputs.items()},
        inputs={name: one.grad for name, one in inputs.items() if one.grad is not None},
        gradients=gradients,
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
