"""Has an optimizer step other tensors than its own for a while: whole ones in place of parts.

The optimizer stays the same object, with its options, hooks and state: only the parameters in its groups are replaced,
and the keys of its state. An optimizer that contains another one shares groups and state with it, so both change.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.parallel.check.optimizer_trial import Trial, inner_optimizers, preserved_randomness
from paceline.parallel.check.parameter_kinds import kinds_of

__all__ = ["standing_in", "why_not_by_owners"]

SHAPE, NUM_STEPS = (6, 5, 2, 2), 5


@contextlib.contextmanager
def standing_in(optimizer: Optimizer, stand_ins: Mapping[Tensor, Tensor | None]) -> Iterator[None]:
    """While it lasts, an optimizer has these tensors in place of its parameters; None: it has not this parameter."""
    known = [optimizer, *inner_optimizers(optimizer)]
    lists = {id(group["params"]): group["params"] for one in known for group in one.param_groups}
    states = {id(one.state): one.state for one in known}
    before = {number: list(held) for number, held in lists.items()}
    try:
        for held in lists.values():
            held[:] = [stand_ins.get(one, one) for one in held if stand_ins.get(one, one) is not None]
        for state in states.values():
            _rename(state, {old: new for old, new in stand_ins.items() if new is not None})
        yield
    finally:
        for number, held in lists.items():
            held[:] = before[number]
        for state in states.values():
            _rename(state, {new: old for old, new in stand_ins.items() if new is not None})


def _rename(state: Any, names: Mapping[Tensor, Tensor]) -> None:
    for old, new in names.items():
        if old in state:
            state[new] = state.pop(old)


def why_not_by_owners(optimizer: Optimizer, parameters: Collection[Tensor] | None = None) -> str | None:
    """Return why parameters of an optimizer (None: all) cannot be stepped by one worker each; None if they can.

    It must step whatever tensors its groups have, and change its options in the same way where they have none. It stays
    as it is.
    """
    for group, dim in kinds_of(optimizer, parameters):
        problem = "it cannot be tried"
        for with_closure, with_state in itertools.product((False, True), (False, True)):
            with preserved_randomness(), contextlib.suppress(Exception):  # an optimizer may raise anything
                expected, options = _steps(optimizer, group, dim, "as they are", with_closure, with_state)
                problem = "it fails, or takes other steps, where its parameters are replaced by others for a step"
                found, of_owner = _steps(optimizer, group, dim, "replaced", with_closure, with_state)
                if not torch.equal(found, expected) or of_owner != options:
                    break
                problem = "it fails, or changes its options in another way, where a group has no parameters for a step"
                _, of_others = _steps(optimizer, group, dim, "absent", with_closure, with_state)
                problem = problem if of_others != options else ""
                break
        if problem:
            return problem
    return None


def _steps(
    optimizer: Optimizer, group: int, dim: int, how: str, with_closure: bool, with_state: bool
) -> tuple[Tensor, list[Any]]:
    """Step two parameters; return where the first has come to, and the options then."""
    numbers = torch.randn(NUM_STEPS + 1, 2, *SHAPE[:dim], generator=torch.Generator().manual_seed(0))
    trial = Trial(optimizer, list(numbers[0]), group=group, with_closure=with_closure, with_state=with_state)
    first, second = trial.parameters
    for gradients in numbers[1:]:
        stand_ins: dict[Tensor, Tensor | None] = {}
        trial.parameters = [first, second]
        if how == "replaced":
            trial.parameters = [torch.nn.Parameter(first.detach().clone()), second]
            stand_ins = {first: trial.parameters[0]}
        elif how == "absent":
            stand_ins = {first: None, second: None}
        with standing_in(trial.optimizer, stand_ins):
            trial.step(list(gradients))
        with torch.no_grad():
            first.copy_(trial.parameters[0])
    told = [
        {key: value for key, value in options.items() if isinstance(value, (int, float, str, tuple, bool, type(None)))}
        for one in (trial.optimizer, *inner_optimizers(trial.optimizer))
        for options in one.param_groups
    ]
    return first.detach(), told
