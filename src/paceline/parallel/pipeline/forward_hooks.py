"""Modules inside a unit whose forward hooks hand their outputs to code outside of it, as transformers collects logits.

A stage without the unit never calls such a module, so its hooks would be silent there. Instead they are silent
everywhere while the unit runs, and are called when it is over: with the outputs where the unit is, with ghosts
elsewhere. So all stages come by the same code, in the same order. A hook is called with the module and its output; the
arguments are not known on other stages, and what it returns would come too late to change anything.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ["HookCall", "call_hooks", "has_hooks", "silenced_hooks"]

HOOKS, NAMED = "_forward_hooks", "_forward_hooks_with_kwargs"  # where torch's modules have them

HookCall = tuple[str, Any]  # the module's name inside the unit, and its output


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody has registered a forward hook on the module itself."""
    return bool(module.__dict__[HOOKS])


@contextlib.contextmanager
def silenced_hooks(unit: nn.Module, names: Iterable[str]) -> Iterator[list[HookCall]]:
    """While it lasts, the hooks of these modules of a unit are silent; yields what they would have been called with."""
    told: list[HookCall] = []
    modules = [(name, unit.get_submodule(name)) for name in dict.fromkeys(names)]
    former = [module.__dict__[HOOKS] for _, module in modules]
    for name, module in modules:
        module.__dict__[HOOKS] = OrderedDict({0: _noting(name, told)})
    try:
        yield told
    finally:
        for (_, module), hooks in zip(modules, former, strict=True):
            module.__dict__[HOOKS] = hooks


def call_hooks(unit: nn.Module, told: Iterable[HookCall]) -> None:
    """Call the hooks; TypeError where one returns another output."""
    for name, output in told:
        module = unit.get_submodule(name)
        for number, hook in list(module.__dict__[HOOKS].items()):
            again = hook(module, (), {}, output) if number in module.__dict__[NAMED] else hook(module, (), output)
            if again is not None:
                raise TypeError("it returns another output")


def _noting(name: str, told: list[HookCall]) -> Callable[[nn.Module, Any, Any], None]:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        told.append((name, output))

    return note
