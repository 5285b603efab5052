"""Verify a split before it is used: a block on random weights must compute the same whole and on emulated workers.

Outputs and the gradients of every input and parameter are compared. A wrong guess about a block, or an operation with a
wrong rule, therefore leads to a refusal and never to another loss. Blocks of one class with the same sizes are verified
once.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.split_tensor import TensorGroupOps, mapped

__all__ = ["captured", "disagreement"]

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
    block: nn.Module, layers: Sequence[Layer], call: SampleInput, *, size: int, sequence: bool
) -> str | None:
    """Return how `size` emulated workers differ from the whole block, in words; None where they agree."""
    try:
        whole = _random_copy(block)  # the copy has its own buffers
        try:
            reference = _run(whole, call, None)
        except RuntimeError:  # some kernels have no double precision
            whole = whole.float()
            reference = _run(whole, call, None)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan itself lists operations that gather
            # Threads share the generator, so it is restored here and not in each of them.
            parts = emulate(size, lambda group: _run_part(whole, layers, call, group, sequence))
    except (RuntimeError, TypeError, ValueError, PlanError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        return f"it cannot be tried: {type(error).__name__}: {lines[0] if lines else ''}"
    for what, expected in reference.all():
        scale = max((float(one.abs().max()) for one in expected.values() if one.numel()), default=0.0)
        for name, value in expected.items():
            for index, part in enumerate(parts):
                found = dict(part.all())[what].get(name)
                if found is None or found.shape != value.shape:
                    return f"{what} {name}: worker {index} has {None if found is None else tuple(found.shape)}"
                if value.numel() and not float((found - value).abs().max()) <= TOLERANCE * scale:
                    off = float((found - value).abs().max()) / (scale or 1.0)
                    return f"{what} {name} of worker {index} is off by {off:.1e} of the largest"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _BlockResult:
    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor]

    def all(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [
            ("output", self.outputs),
            ("the gradient of input", self.inputs),
            ("the gradient of", self.parameters),
        ]


def _random_copy(block: nn.Module) -> nn.Module:
    """Return the block in double precision, without the zeros and ones that would hide an error."""
    whole = copy.deepcopy(block).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in whole.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.5 * noise)
            parameter.grad = None
    return whole


def _run_part(
    whole: nn.Module, layers: Sequence[Layer], call: SampleInput, group: EmulatedGroup, sequence: bool
) -> _BlockResult:
    part = copy.deepcopy(whole)
    ops = TensorGroupOps(group, rules=rule_of, sequence=sequence)
    splits = split_layers(part, layers, ops)
    result = _run(part, call, ops)
    for name, one in splits.items():
        if name in result.parameters:
            result.parameters[name] = one.gathered(result.parameters[name], group)
    return result


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
