"""Run a plan in a group of one and record each collective that a real group would make, and which gradients are
partial."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.errors import Reason
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor.collectives import SingleTensorCollectives
from paceline.parallel.tensor.layer_trace import HARMLESS
from paceline.parallel.tensor.layers import Layer, install, kind_of
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.plan import PlannedCollective
from paceline.parallel.tensor.split_shapes import CannotSplit, Sections
from paceline.parallel.tensor.split_tensor import (
    SplitTensor,
    TensorGroupOps,
    is_in_place,
    mapped,
    name_of,
    on_parts,
    refused_tokens,
    split_tensors_in,
    whole,
)

__all__ = ["TensorDryRun", "dry_run_plan", "gather_inputs"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorDryRun:
    """What a plan does in one forward."""

    crossings: list[PlannedCollective]
    summed: list[str]  # whole parameters that are used on parts only: each worker has a part of their gradient
    gathered: list[str]  # modules without split layers that need whole inputs
    refusals: list[Reason]


def dry_run_plan(
    model: nn.Module, layers: Sequence[Layer], sample: SampleInput, *, size: int, sequence: bool
) -> TensorDryRun:
    """Return what `size` workers would do on `sample`.

    Modules without split layers whose operations have no rule (experts on split tokens, for example) get whole inputs.
    That costs one collective instead of many, and in-place writes go to the module's own copy.
    """
    gathered: list[str] = []
    while True:
        notes = _forward(model, layers, sample, gathered, size=size, sequence=sequence)
        if not notes.lost:
            break
        gathered += sorted(notes.lost)
    names = {id(one): name for name, one in model.named_parameters()}
    return TensorDryRun(
        crossings=notes.crossings,
        summed=[name for one, name in names.items() if one in notes.partial - notes.whole],
        gathered=gathered,
        refusals=notes.refusals,
    )


def gather_inputs(module: nn.Module) -> RemovableHandle:
    """Make a module receive whole inputs, in place, until the handle is removed."""

    def gathered(value: Any) -> Any:
        return whole(value) if isinstance(value, SplitTensor) else value

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return mapped(args, gathered), mapped(kwargs, gathered)

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _forward(
    model: nn.Module,
    layers: Sequence[Layer],
    sample: SampleInput,
    gathered: Sequence[str],
    *,
    size: int,
    sequence: bool,
) -> _DryRunOps:
    modules = dict(model.named_modules())
    around = {
        ".".join(parts[:end]) for parts in (one.name.split(".") for one in layers) for end in range(len(parts) + 1)
    }
    notes = _DryRunOps(size=size, sequence=sequence, around=around | set(gathered))
    hooks: list[RemovableHandle] = []
    try:
        for layer in layers:
            kind = kind_of(modules[layer.name])
            if kind is not None:
                install(modules[layer.name], kind, layer, notes)
        hooks += [gather_inputs(modules[name]) for name in gathered]
        for name, module in modules.items():
            hooks += notes.note_runs(name, module)
        with _WholeParameterUse(notes, {id(one) for one in model.parameters()}), torch.enable_grad():
            sample.run(model)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            vars(modules[layer.name]).pop("forward", None)
    return notes


class _DryRunOps(TensorGroupOps):
    """Operations of a group of one that record each collective as if it moved something."""

    def __init__(self, *, size: int, sequence: bool, around: set[str]) -> None:
        super().__init__(SingleTensorCollectives(), rules=rule_of, sequence=sequence)
        self._planned_size, self._around = size, around
        self._running: list[str] = []  # names of modules, outermost first
        self.lost: set[str] = set()  # the outermost modules without split layers that met an operation without a rule
        self.refusals: list[Reason] = []
        self.crossings: list[PlannedCollective] = []
        self.partial: set[int] = set()
        self.whole: set[int] = set()

    def note_runs(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(lambda *_: self._running.append(name)),
            module.register_forward_hook(self._left),
        ]

    def _left(self, *_: Any) -> None:
        self._running.pop()

    def copy_to_group(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            self.partial.add(id(tensor))
            return tensor
        if tensor.requires_grad:
            self._note("", "all_reduce", tensor)
        return tensor.view_as(tensor)  # a new tensor, as in a larger group

    def total(self, tensor: Tensor) -> Tensor:
        self._note("all_reduce", "", tensor)
        return super().total(tensor)

    def scatter(self, tensor: Tensor, *, dim: int, sections: Sections) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            self.whole.add(id(tensor))
        if tensor.requires_grad:
            self._note("", "all_gather", tensor)
        return super().scatter(tensor, dim=dim, sections=sections)

    def gather(self, split: SplitTensor) -> Tensor:
        self._note("all_gather", "", split)
        return super().gather(split)

    def gather_for_group(self, split: SplitTensor) -> Tensor:
        self._note("all_gather", "reduce_scatter" if split.requires_grad else "", split)
        return super().gather_for_group(split)

    def scatter_total(self, partial: Tensor, *, dim: int, site: str) -> Tensor:
        if refusal := refused_tokens(partial.shape[dim], size=self._planned_size, site=site):
            self.refusals += [] if self.refusals else [refusal]
        self._note("reduce_scatter", "all_gather", partial)
        return super().scatter_total(partial, dim=dim, site=site)

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        outer = [name for name in self._running if name not in self._around]
        if outer:
            self.lost.add(outer[0])
        elif is_in_place(func) and isinstance(args[0], SplitTensor):
            self.refusals.append(self.in_place_refusal(func, args[0], reason))
        with on_parts():
            for split in split_tensors_in((args, kwargs)):
                self._note("all_gather", "", split, is_unplanned=True)

            def whole(value: Any) -> Any:
                return value.view_as(value) if isinstance(value, SplitTensor) else value

            return func(*mapped(args, whole), **mapped(kwargs, whole))

    def _note(self, forward: str, backward: str, tensor: Tensor, *, is_unplanned: bool = False) -> None:
        with on_parts():
            num_bytes = tensor.numel() * tensor.element_size()
        site = tensor.site if isinstance(tensor, SplitTensor) else ""
        self.crossings.append(
            PlannedCollective(
                site=site, forward=forward, backward=backward, num_bytes=num_bytes, is_unplanned=is_unplanned
            )
        )


class _WholeParameterUse(TorchFunctionMode):
    """Records parameters that are used outside of split work."""

    def __init__(self, notes: _DryRunOps, parameters: set[int]) -> None:
        super().__init__()
        self._notes, self._parameters = notes, parameters

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = name_of(func)
        given = (*args, *(kwargs or {}).values())
        if not name.startswith("get:") and name not in HARMLESS and next(split_tensors_in(given), None) is None:
            self._notes.whole.update(id(one) for one in given if id(one) in self._parameters)
        return func(*args, **(kwargs or {}))
