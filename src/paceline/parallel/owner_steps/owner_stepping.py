"""An optimizer whose parameters are parts, and which looks at whole ones: each is stepped by its owner.

The parts of a parameter and of its gradient are gathered at the owner, the optimizer's own step runs there on the
whole, and the new parts are sent back. So a parameter's step is computed once, its state is on one worker, and the
numbers are those of one process. The optimizer stays the user's own object: groups, options, schedulers and hooks.

Parameters without a gradient are left out of a step. Gradients are there on all workers of a parameter or on none:
where any worker used a parameter, all have the sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import full_tensor, is_sharded, local_part
from paceline.errors import PlanError
from paceline.parallel.owner_steps.part_exchange import PartExchange, SplitParameter, TrafficTotals
from paceline.parallel.owner_steps.stand_ins import standing_in
from paceline.parallel.step_takeover import after_loading, take_over_step, unhooked_step

__all__ = ["OwnerStepping"]

ROUND_BYTES = 64 << 20  # of whole parameters, for each worker: more travel in several exchanges


class OwnerStepping:
    """Steps some of an optimizer's parameters at their owners; made once, before the optimizer's first step."""

    def __init__(
        self,
        optimizer: Optimizer,
        split: Mapping[Tensor, SplitParameter],
        traffic: TrafficTotals,
        own_step: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        """Take over the optimizer's `step`. `split`: parameters that have owners, the same ones on all workers; none so
        far, where the script may still switch an option or add a group.
        `own_step`: what steps in the optimizer's own way; by default its `step` without hooks."""
        self._optimizer, self._exchange = optimizer, PartExchange(traffic)
        self.split: dict[Tensor, SplitParameter] = {}
        self._own_step = own_step or unhooked_step(optimizer)
        self.add(split)
        after_loading(optimizer, self._drop_others)
        take_over_step(optimizer, self._step_at_owners)

    def add(self, split: Mapping[Tensor, SplitParameter]) -> None:
        """Have owners step these, too. What state there is of them, since some optimizers make theirs when they are
        created, is then whole at its owner."""
        self.split.update(split)
        for parameter, of in split.items():
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and is_sharded(value):
                    state[key] = full_tensor(value)
                if isinstance(value, Tensor) and value.numel() > 1 and tuple(state[key].shape) != of.hops[-1].shape:
                    raise PlanError(
                        f"{type(self._optimizer).__name__} has {key} {list(value.shape)} for {of.name}, made of a part "
                        "of it, and needs the whole from now on: give the optimizer all options and groups, and no "
                        "state, before worker.prepare(optimizer), or use replicas or stages"
                    )
        self._drop_others()

    def _drop_others(self) -> None:
        """Free the state of parameters that other workers step."""
        for parameter, of in self.split.items():
            if not of.is_own:
                self._optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def _step_at_owners(self) -> None:
        present = [one for group in self._optimizer.param_groups for one in group["params"] if one in self.split]
        moving = [one for one in present if one.grad is not None]
        stand_ins: dict[Tensor, Tensor | None] = dict.fromkeys(present)
        for some in self._rounds(moving):
            wholes = self._exchange.gather(
                [(self.split[p], part) for p in some for part in (local_part(p), local_part(_gradient(p)))]
            )
            for parameter, value, gradient in zip(some, wholes[::2], wholes[1::2], strict=True):
                if value is not None:
                    stand_ins[parameter] = whole = torch.nn.Parameter(value)
                    whole.grad = gradient
                    whole.stands_for = parameter  # pyright: ignore[reportAttributeAccessIssue]  # for those who name parameters
        with standing_in(self._optimizer, stand_ins):
            self._own_step(self._optimizer)
        for some in self._rounds(moving):
            parts = [(self.split[p], stand_ins[p], local_part(p)) for p in some]
            for parameter, part in zip(some, self._exchange.scatter(parts), strict=True):
                local_part(parameter).copy_(part)
                stand_ins[parameter] = None

    def _rounds(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Parameters that travel together. Each worker owns about as many of a round, so none is a bottleneck."""
        owned: dict[tuple[int, ...], list[Tensor]] = {}
        for one in parameters:
            owned.setdefault(self.split[one].owner, []).append(one)
        mixed = [one for each in itertools.zip_longest(*owned.values()) for one in each if one is not None]
        some: list[Tensor] = []
        room = num_bytes = 0
        for one in mixed:
            size = math.prod(self.split[one].hops[-1].shape) * one.element_size()
            room = ROUND_BYTES * math.prod(hop.group.size for hop in self.split[one].hops)
            if some and num_bytes + size > room:
                yield some
                some, num_bytes = [], 0
            some.append(one)
            num_bytes += size
        if some:
            yield some


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter without a gradient takes no part in a step")
    return parameter.grad
