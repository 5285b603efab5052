"""Keeps Paceline's hook the last one before an optimizer's step, so that it sees what the user's hooks have changed."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["keep_last"]


def keep_last(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Have the pre-hook of this handle called after those that are registered from now on, too."""
    register: Any = optimizer.register_step_pre_hook
    hooks: Any = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]  # torch offers no order

    @functools.wraps(register)
    def registered(hook: Any) -> RemovableHandle:
        made = register(hook)
        if handle.id in hooks:
            hooks.move_to_end(handle.id)
        return made

    setattr(optimizer, "register_step_pre_hook", registered)  # noqa: B010  # the stub has it as a method
