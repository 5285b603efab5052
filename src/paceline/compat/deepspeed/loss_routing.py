"""`loss.backward()` of an engine's own loss is `engine.backward(loss)`; those of other models are torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.compat.foreign_steps import ForeignSteps, before_forwards

__all__ = ["LossRouting"]


class LossRouting:
    """From `begin` to `end` it takes the backward of a loss that comes from a model, while a micro-batch is open.

    A loss comes from the model where its graph has what a forward of the micro-batch has returned, or a parameter.
    Under a layout that shards them, and where activations are computed again, a graph has other tensors than the
    parameters: so both are looked for.
    """

    def __init__(self, model: nn.Module, steps: ForeignSteps) -> None:
        self._model, self._steps = model, steps
        self._outputs: list[Any] = []  # nodes of the graph: what the micro-batch's forwards have returned
        self._original: Callable[..., Any] | None = None
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Replace `Tensor.backward`, and have each forward of the model that trains begin a micro-batch."""
        self._hooks = [
            self._model.register_forward_hook(self._remember),
            before_forwards(self._model, self.open_micro),
        ]
        original, routing, steps = Tensor.backward, self, self._steps

        @functools.wraps(original)
        def backward(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_plain = not args and not kwargs and not self.dim()
            if not is_plain or not steps.is_open or steps.is_backward or not routing.is_own(self):
                return original(self, *args, **kwargs)
            return steps.backward(self)

        self._original = original
        Tensor.backward = backward

    def open_micro(self) -> None:
        """Begin a micro-batch before its first forward; see `ForeignSteps.open_micro`."""
        if not self._steps.is_open:
            self._outputs = []
        self._steps.open_micro()

    def end(self) -> None:
        """Put back what `begin` has replaced, unless something has replaced it since."""
        self._outputs = []
        for one in self._hooks:
            one.remove()
        if self._original is not None and getattr(Tensor.backward, "__wrapped__", None) is self._original:
            Tensor.backward = self._original
        self._original = None

    def is_own(self, loss: Tensor) -> bool:
        """Whether a loss comes from the model; one that is part of no graph, too, for the engine says what is wrong."""
        if loss.grad_fn is None or not self._outputs:
            return True
        own = {id(one) for one in self._model.parameters()}
        outputs = {id(one) for one in self._outputs}  # they are held: their ids are theirs
        return any(id(node) in outputs or id(getattr(node, "variable", None)) in own for node in _nodes(loss.grad_fn))

    def _remember(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._outputs += [one.grad_fn for one in _tensors(output) if one.grad_fn is not None]


def _nodes(first: Any) -> Iterator[Any]:
    """The nodes of a graph, from its end on."""
    waiting, seen = [first], {first}
    while waiting:
        node = waiting.pop()
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
