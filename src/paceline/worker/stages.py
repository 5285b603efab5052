"""Models that are cut into stages: who has what of them, and what several of their workers have.

All workers of a replica's stages are given the same micro-batches, and run the model's own forward and the loss on
each, in which other stages' units are absent (see `parallel.stages`). The worker of the last stage has the losses.
Parameters that two stages share have a *home*, the first of them: it sums their gradients, and its word counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.comm.split import local_part
from paceline.parallel.shard import Shards
from paceline.parallel.stages.cut import Cut, keep
from paceline.parallel.stages.link import Link
from paceline.parallel.units import Unit
from paceline.plan import Layout
from paceline.schedule.pipeline import Pipeline, build
from paceline.units import bytes_text
from paceline.worker.pipelined import Pipelined

__all__ = ["SharedGradients", "StagedModel"]


class StagedModel:
    """One worker's stages of a model; what is not of them goes to the meta device when this is made."""

    def __init__(
        self,
        model: nn.Module,
        *,
        units: Sequence[Unit],
        cut: Cut,
        layout: Layout,
        group: WorkerGroup,
        link: Link,
        device: torch.device,
        precision: str,
        note: Callable[[str], None],
        still: Callable[[], AbstractContextManager[None]],
        shards: Shards,
    ) -> None:
        """`group`: the workers of this replica's stages; `note` tells the user a sentence; under `still()` layers that
        are cut, and rows that are split, stay where they are; `shards` knows of rows."""
        self.model, self.units, self.cut, self.group, self.link = model, units, cut, group, link
        self.device, self.precision, self.note, self.still = device, precision, note, still
        self.shards = shards
        self._layout = layout
        self._pipelines: dict[int, Pipeline] = {}
        self._evaluations: dict[Any, Pipelined] = {}
        shape = self.pipeline(1)
        self.own_stages = shape.stages_of(group.index)
        self._worker_of = shape.worker_of
        stage_of = {unit.name: cut.stage_of(unit.name) for unit in units}
        self._stage_of_module = {inner: stage_of[unit.name] for unit in units for inner in unit.module.modules()}
        self.headline = self._headline()
        keep(model, cut, self.own_stages)
        self._is_running = False
        model.register_forward_pre_hook(self._before_forward)

    def pipeline(self, num_micro: int) -> Pipeline:
        """The layout's schedule for so many micro-batches."""
        if num_micro not in self._pipelines:
            self._pipelines[num_micro] = build(
                self._layout.schedule,
                num_workers=self._layout.stages,
                num_micro=num_micro,
                stages_per_worker=self._layout.stages_per_worker,
            )
        return self._pipelines[num_micro]

    def homes(self) -> dict[str, int]:
        """Which of the stages' workers has the word on each entry of the model's state: tensors, and what modules keep
        by `get_extra_state`."""
        model, found = self.model, dict[str, int]()
        for named, stages in ((model.named_parameters, self.cut.parameters), (model.named_buffers, self.cut.buffers)):
            first = {id(tensor): name for name, tensor in named()}
            for name, tensor in named(remove_duplicate=False):
                found[name] = self._worker_of(stages[first[id(tensor)]][0])
        for name in model.state_dict():
            if name not in found:
                module = model.get_submodule(name.rpartition(".")[0])
                found[name] = self._worker_of(self._stage_of_module.get(module, 0))
        return found

    def own_units(self) -> list[tuple[str, nn.Module]]:
        """The units of this worker's stages, with their names, but for those that share parameters with each other."""
        own = [unit for unit in self.units if self.cut.stage_of(unit.name) in self.own_stages]
        held = [{id(parameter) for parameter in unit.module.parameters()} for unit in own]
        return [
            (unit.name, unit.module)
            for place, unit in enumerate(own)
            if not any(held[place] & other for number, other in enumerate(held) if number != place)
        ]

    def shared(self) -> list[tuple[str, Parameter, tuple[int, ...]]]:
        """Parameters here that several workers have: name, parameter, and the workers' indices, the home first."""
        parameters, found = dict(self.model.named_parameters()), []
        for name, stages in sorted(self.cut.shared.items()):
            holders = tuple(dict.fromkeys(self._worker_of(stage) for stage in stages))
            if len(holders) > 1 and self.group.index in holders:
                found.append((name, parameters[name], holders))
        return found

    def is_of_stage(self, module: nn.Module, stage: int) -> bool:
        """Whether what a module's own forward does counts with this stage; the root's with this worker's first."""
        return self._stage_of_module.get(module, self.own_stages[0]) == stage

    def evaluation(self, forward: Callable[[Any], Any], *, key: Any) -> Pipelined:
        """How forwards go through that are told apart by `key`, and are known from one evaluation to the next."""
        if key not in self._evaluations:
            self._evaluations[key] = Pipelined(self, forward)
        self._evaluations[key].loss_of = forward
        return self._evaluations[key]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While it lasts, the model may be called."""
        former, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = former

    def _before_forward(self, *_: Any) -> None:
        if not self._is_running:
            raise RuntimeError(
                f"{type(self.model).__name__} was called outside of step(batch) and worker.evaluate(...), but under "
                f"Layout(stages={self._layout.stages}) this worker has only a part of it. Train by step = "
                "worker.stepper(model, optim, loss), measure by worker.evaluate(model, dataset, measures)"
            )

    def _headline(self) -> str:
        sizes = {id(tensor): tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers()]}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        stages_of = {**self.cut.parameters, **self.cut.buffers}
        said: list[str] = []
        for stage, names in enumerate(self.cut.stages):
            num_bytes = sum(sizes[id(tensor)] for name, tensor in named if stage in stages_of[name])
            what = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} units)"
            said.append(f"{what}: {bytes_text(num_bytes)}")
        return f"{type(self.model).__name__} is cut into {len(said)} stages: " + "; ".join(said)


class SharedGradients:
    """How gradients are spread over stages: each has its own; of what several share, each has a part of the sum."""

    def __init__(self, models: Sequence[StagedModel]) -> None:
        self.group = models[0].group
        self._shared = [(model.link, *one) for model in models for one in model.shared()]
        self._is_home = {id(p): holders[0] == self.group.index for _, _, p, holders in self._shared}

    def counts(self, parameter: Parameter) -> bool:
        """Whether the gradient is here alone, or this worker is its home."""
        return self._is_home.get(id(parameter), True)

    def adds_up(self, parameter: Parameter) -> bool:
        """Whether several stages share it."""
        return id(parameter) in self._is_home

    def holders(self, parameter: Parameter) -> tuple[int, ...]:
        """The stages' workers that share it, the home first."""
        return next((holders for _, _, shared, holders in self._shared if shared is parameter), ())

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Sum what stages share: the others send to the home, and get the sum back."""
        shared = [parameter for parameter in parameters if self.adds_up(parameter)]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.add_up([(one, local_part(one.grad)) for one in shared if one.grad is not None])

    def add_up(self, parts: Sequence[tuple[Parameter, Tensor]]) -> None:
        part_of = {id(parameter): part for parameter, part in parts}
        for link, name, parameter, holders in self._shared:  # in an order that all have
            if id(parameter) in part_of:
                part = part_of[id(parameter)]
                part.copy_(self._summed(link, name, part.contiguous(), holders))

    def _summed(self, link: Link, name: str, part: Tensor, holders: tuple[int, ...]) -> Tensor:
        (home, *others), index, what = holders, self.group.index, f"the gradient of {name}"
        if index == home:
            total = part.clone()
            for other in others:
                came = torch.empty_like(total)
                link.receive(came, source=other, what=what, way=_way(other, home)).wait()
                total += came
            for sent in [link.send(total, to=other, what=what, way=_way(home, other)) for other in others]:
                sent.wait()
            return total
        sent = link.send(part, to=home, what=what, way=_way(index, home))
        came = torch.empty_like(part)
        link.receive(came, source=home, what=what, way=_way(home, index)).wait()
        sent.wait()
        return came


def _way(by: int, to: int) -> str:
    """As the pipeline names it; a worker's first stage has its number."""
    return f"stage {by} to {to}"
