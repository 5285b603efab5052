"""The user's own `torch.utils.checkpoint` between units: each unit that it calls is recomputed by itself.

What torch would keep of such a call are its arguments, which are placeholders on most stages. So the function is called
at once, and the units of this stage that it calls recompute in backward, with their real arguments. Operations between
units are kept. Inside a unit torch's own way stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from paceline.parallel.torch_functions import CHECKPOINT_FUNCTION, CHECKPOINT_GENERATOR

__all__ = ["UserCheckpoints"]


class UserCheckpoints:
    """The calls of `torch.utils.checkpoint.checkpoint` during one forward. `is_inside()`: a unit is running."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        self._is_inside, self._depth = is_inside, 0
        names = vars(torch_checkpoint)
        self._reentrant, self._other = names[CHECKPOINT_FUNCTION], names[CHECKPOINT_GENERATOR]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts, calls between units do not keep their arguments."""
        setattr(torch_checkpoint, CHECKPOINT_FUNCTION, self)
        setattr(torch_checkpoint, CHECKPOINT_GENERATOR, self._without_reentrant)
        try:
            yield
        finally:
            setattr(torch_checkpoint, CHECKPOINT_FUNCTION, self._reentrant)
            setattr(torch_checkpoint, CHECKPOINT_GENERATOR, self._other)

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a unit that is about to be called, so that it recomputes if that was asked for."""
        if not self._depth or not torch.is_grad_enabled():
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            return torch_checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Take the place of torch's reentrant function, which gives no gradients where no argument requires one."""
        if self._is_inside():
            return self._reentrant.apply(function, preserve, *args)
        has_gradients = any(isinstance(one, Tensor) and one.requires_grad for one in args)
        with self._entered(), contextlib.nullcontext() if has_gradients else torch.no_grad():
            return function(*args)

    def _without_reentrant(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Take the place of torch's generator, around whose `yield` the function is called."""
        if self._is_inside():
            yield from self._other(*args, **kwargs)
            return
        with self._entered():
            yield

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
