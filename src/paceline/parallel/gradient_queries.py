"""Gradients that user code asks autograd for by parameters, where Paceline's layouts give it others, or a part of them.

`torch.autograd.grad(loss, model.parameters())` and `loss.backward(inputs=...)` ask for the gradients at these very
tensors, now. Under some layouts the forward has computed with other tensors, so they get None or nothing. Under others
each worker gets a part, which Paceline sums when the micro-batches are done. Neither raises an error in torch.

A backward of the script's own within a step, beside `worker.backward`, adds gradients without a weight.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PlanError, Reason

__all__ = ["BackwardCalls", "backward_calls", "refuse_gradients_at"]

_REFUSED: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}  # by id: the parameter, its name, and why


class BackwardCalls:
    """Whether the backward that runs was called by Paceline, or by the script within a gradient pass."""

    def __init__(self) -> None:
        self.is_in_pass = False
        self.is_scripts = False
        self._is_own = False

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Backwards within it are Paceline's."""
        self._is_own = True
        try:
            yield
        finally:
            self._is_own = False

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A backward runs that adds to the gradients of parameters."""
        before, self.is_scripts = self.is_scripts, self.is_in_pass and not self._is_own
        try:
            yield
        finally:
            self.is_scripts = before

    def require_own(self, name: str) -> None:
        """Called where a gradient arrives; raises RuntimeError in a backward of the script's."""
        if self.is_scripts:
            raise RuntimeError(
                f"loss.backward() made a gradient of {name} within a step, beside worker.backward(loss): it has no "
                "weight in the global batch. Add the losses, and call worker.backward(loss) once for a micro-batch"
            )


backward_calls = BackwardCalls()


def refuse_gradients_at(parameter: Tensor, name: str, why: str) -> None:
    """Refuse from now on what asks autograd for the gradient at `parameter`; `why` names the layout and what happens
    under it."""
    _install()
    number = id(parameter)
    _REFUSED[number] = weakref.ref(parameter, lambda gone: _forget(number, gone)), name, why


def _forget(number: int, gone: weakref.ref[Tensor]) -> None:
    if number in _REFUSED and _REFUSED[number][0] is gone:  # another parameter may have the number by now
        del _REFUSED[number]


@functools.cache
def _install() -> None:
    """Have torch's `grad` and `backward`, which share one way into the engine, look at what they are asked for."""
    into_engine: Any = torch.autograd.graph._engine_run_backward  # pyright: ignore[reportPrivateUsage]  # the one way

    @functools.wraps(into_engine)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and args[3]:  # (gradients of outputs, keep graph, create graph, inputs, ...)
            _check(args[3])
            return into_engine(outputs, *args, **kwargs)
        with backward_calls.called():
            return into_engine(outputs, *args, **kwargs)

    for module in (torch.autograd.graph, torch.autograd):
        setattr(module, "_engine_run_backward", run_backward)  # noqa: B010  # a private name to type checkers


def _check(inputs: Sequence[Any]) -> None:
    for one in inputs:
        found = _REFUSED.get(id(one))
        if found is None or found[0]() is not one:
            continue
        _, name, why = found
        said = f"torch.autograd.grad() or backward(inputs=...) at {name}: {why}."
        remedy = (
            "A hook (parameter.register_hook) sees each gradient whole, once a step; worker.clip_gradients(max_norm) "
            "returns the norm of all. Or use Layout(replicas=n)"
        )
        raise PlanError(f"{said} {remedy}", reasons=[Reason(module=name, what=said, remedy=remedy)])
