"""What an optimizer keeps for each parameter: found by a trial when it is prepared, so that no save fails later.

Checkpoints hold tensors in the shape of their parameter, single numbers, other tensors of parameters that are whole,
and plain values. Queues, objects and functions cannot be stored. What an optimizer keeps outside of its state and
options (in attributes, or in another optimizer that it contains) would be missing after a resume.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.parallel.check.optimizer_trial import Phase, Trial, late_steps, preserved_randomness

__all__ = ["KeptState", "kept_state"]

SIDE = 6
NUM_FIRST = 4  # steps as they come
NUM_AFTER = 3  # steps after a resume


@dataclasses.dataclass(frozen=True, slots=True)
class KeptState:
    """What a trial has found beside tensors of their parameter's shape and single numbers."""

    odd_tensors: tuple[str, ...] = ()  # entries that are tensors of other shapes
    refused: str = ""  # why the state or the options cannot be stored
    is_incomplete: bool = False  # after a resume it would take other steps


def kept_state(optimizer: Optimizer, store: Callable[[Any], Any]) -> KeptState:
    """Try an optimizer for some steps, and return what is special about its state; it stays as it is.

    `store` returns a copy of plain values as a checkpoint holds them, and raises where it cannot. Nothing is found
    about an optimizer that cannot be tried.
    """
    for group, options in enumerate(optimizer.param_groups):
        dim = max((one.dim() for one in options["params"]), default=0)
        for with_closure, with_state in itertools.product((False, True), (False, True)):
            trial = _tried(optimizer, group, dim, with_closure=with_closure, with_state=with_state)
            if trial is None:
                continue
            found = _judged(trial, store)
            if found != KeptState():
                return found
            break
    return KeptState()


def _tried(optimizer: Optimizer, group: int, dim: int, **how: bool) -> Trial | None:
    shape = (SIDE, SIDE - 1, 3, 3, *[2] * dim)[:dim]
    generator = torch.Generator().manual_seed(0)
    value, *gradients = torch.randn(NUM_FIRST + NUM_AFTER + 1, *shape, generator=generator)
    late = [number for number in late_steps(optimizer, group) if number <= 1000][:2]
    steps = [[one] for one in gradients[:NUM_FIRST]]
    try:
        with preserved_randomness():
            trial = Trial(optimizer, [value], group=group, **how)
            for _ in trial.run([Phase(steps), *(Phase(steps[:3], count=number - 1) for number in late)]):
                pass
    except Exception:  # an optimizer may raise anything
        return None
    return trial


def _judged(trial: Trial, store: Callable[[Any], Any]) -> KeptState:
    optimizer, (parameter,) = trial.optimizer, trial.parameters
    beside = [str(key) for key in optimizer.state if not isinstance(key, Tensor)]
    if beside:
        return KeptState(refused=f"it keeps {', '.join(beside)} in its state, which belongs to no parameter")
    entries = optimizer.state.get(parameter, {})
    options = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
    plain = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
    try:
        store({"state": plain, "options": options})
    except Exception as error:  # whatever it cannot store
        return KeptState(refused=str(error).partition(". A checkpoint holds")[0])
    odd = [
        f"{key} {list(value.shape)} for {list(parameter.shape)}"
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape
    ]
    return KeptState(odd_tensors=tuple(odd), is_incomplete=not _resumes(trial))


def _resumes(trial: Trial) -> bool:
    """Whether an optimizer that begins with what is stored of another one takes the same steps as that one."""
    generator = torch.Generator().manual_seed(1)
    (parameter,) = trial.parameters
    gradients = torch.randn(NUM_AFTER, *parameter.shape, generator=generator)
    try:
        fresh = Trial(trial.source, [parameter.detach()], **trial.how)
        state = copy.deepcopy(dict(trial.optimizer.state.get(parameter, {})))
        if state:
            fresh.optimizer.state[fresh.parameters[0]] = state
        for own, other in zip(trial.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
            other.update({key: copy.deepcopy(value) for key, value in own.items() if key != "params"})
        for gradient in gradients:
            before = parameter.detach().clone()
            for one in (trial, fresh):
                with preserved_randomness():
                    one.step([gradient])
            size = float((parameter.detach() - before).abs().max())
            if not torch.allclose(parameter, fresh.parameters[0], rtol=1e-5, atol=1e-2 * size, equal_nan=True):
                return False
    except Exception:  # an optimizer may raise anything
        return False
    return True
