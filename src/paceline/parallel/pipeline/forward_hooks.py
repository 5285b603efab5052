"""Modules inside a unit whose forward hooks hand their outputs to code outside of it, as transformers collects logits.

A stage without the unit never calls such a module, so its hooks would not run there. Instead they are silenced on all
stages while the unit runs, and called when it is over: with the outputs on the unit's stage, with placeholders
elsewhere. So all stages run the same code in the same order. A hook is called with the module and its output. The
arguments are unknown on other stages, and a returned value would come too late to change anything.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from paceline.errors import PlanError

__all__ = ["HookCall", "call_hooks", "has_hooks", "refuse_backward_hooks", "silenced_hooks"]

HOOKS, NAMED = "_forward_hooks", "_forward_hooks_with_kwargs"  # where torch's modules keep them

HookCall = tuple[str, Any]  # the module's name inside the unit, and its output


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward hook is registered on the module itself."""
    return bool(module.__dict__[HOOKS])


@contextlib.contextmanager
def silenced_hooks(unit: nn.Module, names: Iterable[str]) -> Iterator[list[HookCall]]:
    """Within it, the hooks of these modules of a unit are silenced; yields the calls that they would have got."""
    hook_outputs: list[HookCall] = []
    modules = [(name, unit.get_submodule(name)) for name in dict.fromkeys(names)]
    former = [module.__dict__[HOOKS] for _, module in modules]
    for name, module in modules:
        module.__dict__[HOOKS] = OrderedDict({0: _noting(name, hook_outputs)})
    try:
        yield hook_outputs
    finally:
        for (_, module), hooks in zip(modules, former, strict=True):
            module.__dict__[HOOKS] = hooks


def refuse_backward_hooks(model: nn.Module, units: Iterable[nn.Module], layout: str) -> None:
    """Raise PlanError for hooks on the backward of a unit, or of a module with units in it: no stage would run them.

    Of modules inside units, whose backward is within one stage, they run as always.
    """
    inside = {inner for unit in units for inner in unit.modules() if inner is not unit}
    for name, module in model.named_modules():
        if module not in inside and (vars(module)["_backward_hooks"] or vars(module)["_backward_pre_hooks"]):
            raise PlanError(
                f"{name or 'the model'} has a hook on its backward (register_full_backward_hook), but under {layout} "
                "the backward of a stage begins and ends elsewhere. Put the hook on a module inside it, or a hook on "
                "a tensor of its forward (output.register_hook)"
            )


def call_hooks(unit: nn.Module, hook_outputs: Iterable[HookCall]) -> None:
    """Call the hooks; raises TypeError if one returns another output."""
    for name, output in hook_outputs:
        module = unit.get_submodule(name)
        for number, hook in list(module.__dict__[HOOKS].items()):
            again = hook(module, (), {}, output) if number in module.__dict__[NAMED] else hook(module, (), output)
            if again is not None:
                raise TypeError("it returns another output")


def _noting(name: str, hook_outputs: list[HookCall]) -> Callable[[nn.Module, Any, Any], None]:
    def note(_: nn.Module, __: Any, output: Any) -> None:
        hook_outputs.append((name, output))

    return note
