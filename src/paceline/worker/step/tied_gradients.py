"""Sums gradients of parameters that pipeline stages share, at their home: the first of the stages that have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.pipeline.stage_transfer import StageTransport
from paceline.worker.step.pipeline_stages import PipelineModel

__all__ = ["TiedStageGradients"]


class TiedStageGradients:
    """Sums the gradients of parameters that several stages share; each stage has a part of the sum."""

    def __init__(self, models: Sequence[PipelineModel]) -> None:
        self.group = models[0].group
        self._shared = [(model.link, *one) for model in models for one in model.shared()]
        self._is_home = {id(p): holders[0] == self.group.index for _, _, p, holders in self._shared}

    def counts(self, parameter: Parameter) -> bool:
        """Whether no other stage has the gradient, or this worker is its home."""
        return self._is_home.get(id(parameter), True)

    def adds_up(self, parameter: Parameter) -> bool:
        """Whether several stages share it."""
        return id(parameter) in self._is_home

    def holders(self, parameter: Parameter) -> tuple[int, ...]:
        """The stages' workers that share it, the home first."""
        return next((holders for _, _, shared, holders in self._shared if shared is parameter), ())

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Sum the gradients that stages share: the others send to the home, which sends the sum back."""
        shared = [parameter for parameter in parameters if self.adds_up(parameter)]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.add_up([(one, local_part(one.grad)) for one in shared if one.grad is not None])

    def add_up(self, parts: Sequence[tuple[Parameter, Tensor]]) -> None:
        """Sum these tensors over the stages that share each parameter, in place."""
        part_of = {id(parameter): part for parameter, part in parts}
        for link, name, parameter, holders in self._shared:  # in the same order on all workers
            if id(parameter) in part_of:
                part = part_of[id(parameter)]
                part.copy_(self._summed(link, name, part.contiguous(), holders))

    def _summed(self, link: StageTransport, name: str, part: Tensor, holders: tuple[int, ...]) -> Tensor:
        (home, *others), index, what = holders, self.group.index, f"the gradient of {name}"
        if index == home:
            total = part.clone()
            for other in others:
                received = torch.empty_like(total)
                link.receive(received, source=other, what=what, way=_link_direction(other, home)).wait()
                total += received
            for sent in [link.send(total, to=other, what=what, way=_link_direction(home, other)) for other in others]:
                sent.wait()
            return total
        sent = link.send(part, to=home, what=what, way=_link_direction(index, home))
        received = torch.empty_like(part)
        link.receive(received, source=home, what=what, way=_link_direction(home, index)).wait()
        sent.wait()
        return received


def _link_direction(by: int, to: int) -> str:
    """The name that the pipeline gives this direction; a worker's first stage has the worker's number."""
    return f"stage {by} to {to}"
