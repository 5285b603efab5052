"""Puts a function of Paceline's in the place of an optimizer's `step`, which stays as it was to everybody else.

The optimizer is the user's own object. Its hooks run once a step, schedulers see that it has stepped, and a closure is
called first.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["after_loading", "take_over_step", "unhooked_step"]


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """An optimizer's own step, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def after_loading(optimizer: Optimizer, call: Callable[[], None]) -> None:
    """Call `call()` whenever the optimizer has loaded a state."""
    if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        optimizer.register_load_state_dict_post_hook(lambda _: call())
        return
    load = optimizer.load_state_dict  # a wrapper of another package that has no hooks

    @functools.wraps(load)
    def loaded(_: Optimizer, state_dict: Any) -> None:
        load(state_dict)
        call()

    optimizer.load_state_dict = types.MethodType(loaded, optimizer)


def take_over_step(optimizer: Optimizer, take: Callable[[], None]) -> None:
    """Have `optimizer.step()` call `take()`, with torch's hooks around it."""

    @functools.wraps(unhooked_step(optimizer))
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A scheduler notes here that step() was called, where it was made before this method was.
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # an attribute that torch sets and does not declare
        take()
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True  # one that is made later need not wrap this once more
    optimizer.step = types.MethodType(hooked, optimizer)
