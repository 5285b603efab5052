"""An optimizer whose state is in bf16 between steps, and in fp32 while it steps.

A step passes over the parameters, some at a time: their state becomes fp32, the optimizer's own step runs for them, and
the state is rounded stochastically. So the optimizer computes as it always does, `foreach` and `fused` included.

In bf16 are fp32 tensors of the parameter's own shape: averages of gradients and of their squares, momentum. Counts,
rows and columns, preconditioners and copies of the weights (of schedule-free optimizers) stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import TensorSlice, as_local_of, is_sharded, local_part, rows_of
from paceline.parallel.check.optimizer_trial import Trial, inner_optimizers, preserved_randomness
from paceline.parallel.check.parameter_kinds import kinds_of
from paceline.parallel.rounded_state.stochastic_rounding import ElementIndex, round_stochastically, rounding_key
from paceline.parallel.step_takeover import after_loading

__all__ = ["RoundedStepping", "StepCount", "copies_of_weights"]

SOME_BYTES = 32 << 20  # of parameters whose state is in fp32 at a time


@dataclasses.dataclass(slots=True)
class StepCount:
    """How many steps an optimizer has taken; a part of the run's state."""

    num_steps: int = 0


class RoundedStepping:
    """Keeps the state of one optimizer in bf16."""

    def __init__(
        self,
        optimizer: Optimizer,
        own_step: Callable[[Optimizer], Any],
        *,
        seed: int,
        count: StepCount,
        name_of: Callable[[Tensor], str],
        slice_of: Callable[[str], TensorSlice | None],
    ) -> None:
        """`own_step`: the optimizer's, without hooks. `name_of`, `slice_of`: of a parameter, the name and what is here
        of it."""
        self._optimizer, self._own_step, self._seed, self._count = optimizer, own_step, seed, count
        self._name_of, self._slice_of = name_of, slice_of
        self._exempt = copies_of_weights(optimizer)
        self._round_all()
        after_loading(optimizer, self._round_all)

    @torch.no_grad()
    def step(self, _: Optimizer) -> None:
        """Step some parameters after the other."""
        self._count.num_steps += 1
        with _OneGroup(self._optimizer) as groups:
            for number, held in enumerate(groups.held):
                for some in self._in_turn(held):
                    groups.show(number, some)
                    for parameter in some:
                        self._widen(parameter)
                    self._own_step(self._optimizer)
                    for parameter in some:
                        self._narrow(parameter)

    def _in_turn(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        some: list[Tensor] = []
        num_bytes = 0
        for one in parameters:
            size = 0 if one.is_meta else local_part(one).nbytes
            if some and num_bytes + size > SOME_BYTES:
                yield some
                some, num_bytes = [], 0
            some.append(one)
            num_bytes += size
        yield some  # one that is empty is stepped, too: options may count steps

    def _widen(self, parameter: Tensor) -> None:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and self._is_rounded(parameter, key, value):
                state[key] = value.float()

    def _narrow(self, parameter: Tensor) -> None:
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        wide = {
            key: value
            for key, value in sorted(state.items())
            if isinstance(value, Tensor) and value.dtype == torch.float32 and self._is_rounded(parameter, key, value)
        }
        if not wide:
            return
        own = getattr(parameter, "stands_for", parameter)
        key = rounding_key(self._seed, self._count.num_steps, self._name_of(own))
        locals_ = [local_part(one) for one in wide.values()]
        narrow = round_stochastically(locals_, self._index(parameter, own), key) if locals_[0].numel() else locals_
        for (name, value), rounded in zip(wide.items(), narrow, strict=True):
            state[name] = as_local_of(rounded.to(torch.bfloat16), value)

    def _is_rounded(self, parameter: Tensor, key: str, value: Tensor) -> bool:
        is_alike = value.shape == parameter.shape and value.dim() > 0 and is_sharded(value) == is_sharded(parameter)
        return is_alike and parameter.dtype == torch.float32 and key not in self._exempt

    def _index(self, parameter: Tensor, own: Tensor) -> ElementIndex:
        """Where the numbers of a parameter's state are in the whole."""
        cut = self._slice_of(self._name_of(own)) if parameter is own else None
        whole = tuple(parameter.shape) if cut is None else cut.shape
        device = local_part(parameter).device
        places = [torch.arange(size, device=device) for size in whole]
        if cut is not None:
            places[cut.dim] = torch.cat([places[cut.dim][first:stop] for first, stop in cut.ranges])
        if is_sharded(parameter):
            mesh = parameter.device_mesh
            first, stop = rows_of(len(places[0]), index=mesh.get_local_rank(), size=mesh.size())
            places[0] = places[0][first:stop]
        return ElementIndex(whole, places)

    @torch.no_grad()
    def _round_all(self) -> None:
        """Torch gives state that it loads the type of its parameter: what was in bf16 comes back to the bit."""
        for parameter in list(self._optimizer.state):
            if isinstance(parameter, Tensor) and not parameter.is_meta:
                self._narrow(parameter)


class _OneGroup:
    """Has an optimizer, and those in it, see some parameters of one group at a time. Whatever steps change in a group's
    options, they change once."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [group for one in (optimizer, *inner_optimizers(optimizer)) for group in one.param_groups]
        self._lists = {id(group["params"]): group["params"] for group in groups}
        self._groups = {id(group): group for group in groups}
        self._began = {number: _options(group) for number, group in self._groups.items()}
        self._ended = dict(self._began)
        self._shown: int | None = None  # the id of a list
        self.held: list[list[Tensor]] = [list(one) for one in self._lists.values()]

    def __enter__(self) -> _OneGroup:
        return self

    def show(self, number: int, some: list[Tensor]) -> None:
        """Show some parameters of one group; the options of it are as before the step."""
        self._note()
        for place, (key, held) in enumerate(self._lists.items()):
            held[:] = some if place == number else []
            self._shown = key if place == number else self._shown
        for key, group in self._groups.items():
            _give(group, self._began[key] if id(group["params"]) == self._shown else self._ended[key])

    def _note(self) -> None:
        for key, group in self._groups.items():
            if self._shown is not None and id(group["params"]) == self._shown:
                self._ended[key] = _options(group)

    def __exit__(self, *_: object) -> None:
        self._note()
        for held, before in zip(self._lists.values(), self.held, strict=True):
            held[:] = before
        for key, group in self._groups.items():
            _give(group, self._ended[key])


def _give(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Have a group these options and no others."""
    for key in group.keys() - options.keys() - {"params"}:
        del group[key]
    group.update(options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def copies_of_weights(optimizer: Optimizer) -> frozenset[str]:
    """Return the entries of an optimizer's state that are weights: without a gradient they equal the parameter. It
    stays as it is."""
    found: set[str] = set()
    for group, dim in kinds_of(optimizer):
        value = torch.randn((4, 3, 2, 2, *[2] * dim)[:dim], generator=torch.Generator().manual_seed(0))
        for with_closure, with_state in itertools.product((False, True), (False, True)):
            with preserved_randomness(), contextlib.suppress(Exception):  # an optimizer may raise anything
                trial = Trial(optimizer, [value], group=group, with_closure=with_closure, with_state=with_state)
                trial.step([torch.zeros_like(value)])
                (parameter,) = trial.parameters
                entries = trial.optimizer.state.get(parameter, {}).items()
                found |= {
                    str(key)
                    for key, one in entries
                    if isinstance(one, Tensor) and one.shape == value.shape and torch.allclose(one, value, rtol=0.2)
                }
                break
    return frozenset(found)
