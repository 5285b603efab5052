"""Gradients of split layers, as they landed: whether user code has written to them before the optimizer's step.

A norm of the local parts is not the model's, and workers that clip by their own norm take different steps. Clipping by
value treats each number by itself, and is right on parts: torch's function for it is known, and allowed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["SealedGradients"]


class SealedGradients:
    """The gradients of one reducer, and their versions."""

    def __init__(self) -> None:
        self._sealed: list[tuple[str, Parameter, Tensor, int]] = []

    def seal(self, named: Iterable[tuple[str, Parameter]]) -> None:
        """Remember the current gradients."""
        _allow_clipping_by_value()
        _live.add(self)
        self._sealed = [(name, p, p.grad, p.grad._version) for name, p in named if p.grad is not None]

    def clear(self) -> None:
        """Forget them."""
        self._sealed = []

    def changed(self) -> str | None:
        """Return the name of the first parameter whose gradient was changed, or replaced; None: all are as they
        were."""
        for name, parameter, gradient, version in self._sealed:
            if parameter.grad is not None and (parameter.grad is not gradient or gradient._version != version):
                return name
        return None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if user code has written to a gradient."""
        name = self.changed()
        if name is not None:
            raise RuntimeError(
                f"the gradient of {name} was changed between the pass over the batch and optim.step() "
                "(clip_grad_norm_?), but each worker has only a part of it, and of its norm: call "
                "worker.clip_gradients(max_norm) in its place, worker.clip_gradients(max_value=...) to clip by value, "
                "or scale the loss. What concerns one parameter (centering its gradient, a mask) can be a hook: "
                "parameter.register_hook(fn) gets its gradient whole, once a step"
            )

    def seal_again(self) -> None:
        """Take the present gradients for unchanged."""
        self.seal([(name, parameter) for name, parameter, _, _ in self._sealed])


_live: weakref.WeakSet[SealedGradients] = weakref.WeakSet()


@functools.cache
def _allow_clipping_by_value() -> None:
    """Have `torch.nn.utils.clip_grad_value_` leave gradients sealed."""
    original = torch.nn.utils.clip_grad_value_

    @functools.wraps(original)
    def clip_grad_value_(*args: Any, **options: Any) -> None:
        unchanged = [one for one in _live if one.changed() is None]
        original(*args, **options)
        for one in unchanged:
            one.seal_again()

    torch.nn.utils.clip_grad_value_ = torch.nn.utils.clip_grad.clip_grad_value_ = clip_grad_value_
