"""Remarks of a model check that are no refusals: what is split how much, what stays whole, what is tied or unused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline.parallel.check.model_check import ModelCheck
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.tensor_tree import tensors_in
from paceline.parallel.sample_input import SampleInput
from paceline.plan import Layout
from paceline.schedule.pipeline import build
from paceline.units import bytes_text

__all__ = ["Remark", "remarks"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A sentence about a module, or about several of one kind."""

    module: str
    what: str


def remarks(model: nn.Module, checked: ModelCheck, layout: Layout, *, sample: SampleInput | None) -> list[Remark]:
    """Return the remarks about a model; `sample` is needed to know which parameters are unused."""
    found = [
        *_unverified(checked),
        *_sharded(model, checked, layout),
        *_split_layers(checked),
        *_staged(model, checked, layout),
        *_shared(checked),
    ]
    return list(dict.fromkeys([*found, *_tied(model, checked, layout), *_unused(model, checked.name, sample)]))


def _unverified(checked: ModelCheck) -> Iterator[Remark]:
    if not checked.is_verified:
        what = (
            "is too large to run here: its cuts follow from shapes alone. worker.prepare(...) compares numbers, too, "
            "and finds how sequences are cut; to have that now, check a model of the same kind with smaller layers."
        )
        yield Remark(module=checked.name, what=what)


def _sharded(model: nn.Module, checked: ModelCheck, layout: Layout) -> Iterator[Remark]:
    if layout.shard > 1:
        units = units_of(model, checked.units)
        sizes = {name: sum(one.numel() * one.element_size() for one in unit.parameters()) for name, unit in units}
        what = f"shard={layout.shard}: every parameter's rows are split"
        if units:
            name = max(sizes, key=lambda one: sizes[one])
            many = f"{len(units)} units are gathered by themselves, the largest"
            what += f"; {many if len(units) > 1 else 'gathered by itself is'} {name} of {bytes_text(sizes[name])}"
        yield Remark(module=checked.name, what=f"{what}.")


def _split_layers(checked: ModelCheck) -> Iterator[Remark]:
    if checked.tensor is None:
        return
    yield Remark(module=checked.name, what=f"{checked.tensor.headline}.")
    for row in checked.tensor.rows:
        if row.role == "whole" and row.num_bytes:
            what = f"stays whole, {bytes_text(row.num_bytes)} on each worker: {row.why}."
            yield Remark(module=general(row.name), what=what)


def _staged(model: nn.Module, checked: ModelCheck, layout: Layout) -> Iterator[Remark]:
    if checked.stages is None:
        return
    partition, sizes = (
        checked.stages.partition,
        {name: one.numel() * one.element_size() for name, one in model.named_parameters()},
    )
    for stage, names in enumerate(partition.stages):
        num_bytes = sum(sizes[name] for name, stages in partition.parameters.items() if stage in stages)
        what = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} units)"
        yield Remark(module=f"stage {stage}", what=f"{what}: {bytes_text(num_bytes)} of parameters.")
    for joint in checked.stages.tape.joints:
        yield Remark(module=unit_name(checked, joint.first), what=f"is on one stage with others: {joint.reason}.")


def unit_name(checked: ModelCheck, index: int) -> str:
    """Return the name of a unit by its index in the recorded forward."""
    return checked.stages.tape.units[index] if checked.stages is not None else checked.name


def _shared(checked: ModelCheck) -> Iterator[Remark]:
    if checked.context is not None:
        for line in str(checked.context).splitlines():
            yield Remark(module=checked.name, what=f"{line.strip()}.")


def _tied(model: nn.Module, checked: ModelCheck, layout: Layout) -> Iterator[Remark]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in (group for group in names.values() if len(group) > 1):
        what = f"is one tensor with {', '.join(others)}"
        if checked.stages is not None:
            pipeline = build(
                layout.schedule, num_workers=layout.stages, num_micro=1, stages_per_worker=layout.stages_per_worker
            )
            stages = checked.stages.partition.parameters[first]
            holders = sorted({pipeline.worker_of(stage) for stage in stages})
            if len(holders) > 1:
                what += (
                    f"; stages {', '.join(map(str, stages))} each hold it, and their gradients are summed on stage "
                    f"{stages[0]}"
                )
            else:
                what += f"; stage {stages[0]} holds it"
        yield Remark(module=first, what=f"{what}.")


def _unused(model: nn.Module, root: str, sample: SampleInput | None) -> Iterator[Remark]:
    """Yield trainable parameters that no gradient of the sample reaches; whole modules if none of theirs is reached."""
    if sample is None:
        what = "no small input could be guessed, or the model is large: unused parts are not known."
        yield Remark(module=root, what=what)
        return
    with torch.enable_grad():
        reached = _reached(tensors_in(sample.run(model)))
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    idle = {id(one) for one in trained.values() if id(one) not in reached}
    named: list[str] = []
    for name, module in model.named_modules():
        own = {id(one) for one in module.parameters() if one.requires_grad}
        is_inside = any(not one or name.startswith(f"{one}.") for one in named)
        if own and own <= idle and not is_inside:
            named.append(name)
            yield Remark(module=name or root, what="the sample does not use it, so it gets no gradient from it.")
    for name, one in trained.items():
        if id(one) in idle and not any(not module or name.startswith(f"{module}.") for module in named):
            yield Remark(module=name, what="the sample does not use it, so it gets no gradient from it.")


def _reached(outputs: list[Tensor]) -> set[int]:
    """Return the ids of the parameters on which the outputs depend."""
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen, found = set(waiting), {id(one) for one in outputs if one.is_leaf}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return found


def general(name: str) -> str:
    """Return the name with its numbers replaced by "*": "layers.*.mlp"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
