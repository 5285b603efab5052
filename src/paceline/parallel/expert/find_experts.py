"""Find which modules of a model are routed experts, and how they keep their weights.

The protocol is that of transformers. Experts are a module of their own, called as `experts(tokens, index, weights)`
with tokens (n, width), the numbers of each token's experts (n, k) and their weights (n, k). It returns (n, width): for
each token the weighted sum over its k experts. The module learns the number of experts from itself only:

    stacked    parameters whose first dim is the experts, as many as `self.num_experts`
    a list     an `nn.ModuleList` with such a forward, or ModuleLists inside, with one member for each expert

The router, and its losses, may be anything.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from paceline.errors import PlanError, Reason

__all__ = ["RoutedExperts", "find_experts", "routed_experts"]

DOCS = "docs/explanation/layouts.md, 'Expert parallel', shows how such a module is written"
ARGUMENTS = 3  # tokens, index, weights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """A module that computes `count` experts."""

    name: str
    module: nn.Module
    count: int
    stacked: tuple[str, ...]  # its own parameters whose first dim is the experts
    lists: tuple[str, ...]  # ModuleLists with one member for each expert: its children, or itself ("")

    def members(self) -> list[tuple[str, list[nn.Module]]]:
        """Return each list's name in the model, and its members."""
        found: list[tuple[str, list[nn.Module]]] = []
        for key in self.lists:
            members: Any = self.module.get_submodule(key)
            found.append((_joined(self.name, key), list(members)))
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that belong to one expert each."""
        yield from (getattr(self.module, key) for key in self.stacked)
        for _, members in self.members():
            for member in members:
                yield from member.parameters()


def routed_experts(model: nn.Module) -> list[RoutedExperts]:
    """Return what looks like routed experts in a model; none where there are none."""
    return [_described(name, module) for name, module in model.named_modules() if _looks_routed(module)]


def find_experts(model: nn.Module, *, size: int, named: Sequence[str] = ()) -> list[RoutedExperts]:
    """Return a model's routed experts, to be distributed over `size` workers.

    `named`: patterns of names of the experts' modules, to use instead of a search. Raises PlanError with every reason
    against it: none was found, numbers do not divide, or a module cannot be distributed.
    """
    modules = dict(model.named_modules())
    if named:
        names = [name for name in modules if any(fnmatch.fnmatchcase(name, one) for one in named)]
        lost = [one for one in named if not any(fnmatch.fnmatchcase(name, one) for name in modules)]
        if lost:
            raise PlanError(f"experts={lost!r} match no module of {type(model).__name__}: {_suggested(modules)}")
    else:
        names = [one.name for one in routed_experts(model)]
    found = [_described(name, modules[name]) for name in names]
    if not found:
        what = (
            f"Layout(experts={size}) found no routed experts in {type(model).__name__}: it looks for a module that is "
            "called as experts(tokens, index, weights) and has num_experts, or is an nn.ModuleList. "
            f"{_suggested(modules)}"
        ).strip()
        remedy = f"Use shard={size} in its place, which splits any model; {DOCS}."
        reason = Reason(module=type(model).__name__, what=what, remedy=remedy)
        raise PlanError(str(reason), reasons=[reason])
    wrong = [
        Reason(module=one.name, what=what, remedy=remedy)
        for one in found
        for what, remedy in _reasons_against(one, model, size)
    ]
    if wrong:
        raise PlanError.listing(
            f"Layout(experts={size}) cannot distribute the experts of {type(model).__name__}", wrong
        )
    return found


def _looks_routed(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    if not isinstance(module, nn.ModuleList) and not (isinstance(count, int) and count > 1):
        return False
    if not _takes_routed_tokens(module):
        return False
    one = _described("", module)
    return one.count > 1 and bool(one.stacked or one.lists)


def _takes_routed_tokens(module: nn.Module) -> bool:
    """Return whether the module's forward can be called with three positional arguments."""
    if isinstance(module, nn.ModuleList) and type(module).forward is nn.ModuleList.forward:
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in inspect.signature(module.forward).parameters.values() if one.kind in kinds]
    needed = [one for one in given if one.default is inspect.Parameter.empty]
    return len(given) >= ARGUMENTS >= len(needed)


def _described(name: str, module: nn.Module) -> RoutedExperts:
    own = dict(module.named_parameters(recurse=False))
    count: Any = len(module) if isinstance(module, nn.ModuleList) else getattr(module, "num_experts", None)
    if not isinstance(count, int):
        firsts = {parameter.shape[0] for parameter in own.values() if parameter.ndim}
        count = firsts.pop() if len(firsts) == 1 else 0
    lists = [""] if isinstance(module, nn.ModuleList) else []
    lists += [key for key, one in module.named_children() if isinstance(one, nn.ModuleList) and len(one) == count]
    stacked = [key for key, one in own.items() if one.ndim and one.shape[0] == count]
    return RoutedExperts(name=name, module=module, count=count, stacked=tuple(stacked), lists=tuple(lists))


def _reasons_against(one: RoutedExperts, model: nn.Module, size: int) -> list[tuple[str, str]]:
    """Return each reason against distributing these experts, with its remedy."""
    shown = f"Write it otherwise: {DOCS}."
    if not _takes_routed_tokens(one.module):
        return [(f"{one.name} is not called as experts(tokens, index, weights).", shown)]
    if one.count < 2 or not (one.stacked or one.lists):
        return [(f"{one.name} has neither parameters whose first dim is num_experts, nor lists of as many.", shown)]
    reasons: list[tuple[str, str]] = []
    if one.count % size:
        would = " or ".join(str(n) for n in range(2, one.count + 1) if one.count % n == 0)
        what = f"{one.name} has {one.count} experts, which {size} workers cannot share evenly."
        reasons.append((what, f"Use experts={would}."))
    held = {id(getattr(one.module, key)) for key in one.stacked}
    for name, members in one.members():
        shapes = [[(key, p.shape, p.dtype) for key, p in member.named_parameters()] for member in members]
        if any(shape != shapes[0] for shape in shapes):
            what = f"The members of {name} do not all have parameters of the same shapes."
            reasons.append((what, "Make them of one kind and size."))
        held.update(id(parameter) for member in members for parameter in member.parameters())
    for key, _ in one.module.named_buffers():
        what = f"{_joined(one.name, key)} is a buffer among experts, and would see the tokens of several workers."
        reasons.append((what, "Keep it in the module that routes."))
    # A second name would be unknown where its first name's parameter is left to another worker, and to checkpoints.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in held:
            names.setdefault(id(parameter), []).append(name)
    for alike in names.values():
        if len(alike) > 1:
            what = f"{', '.join(alike)} are one parameter, so it does not belong to one expert only."
            reasons.append((what, "Untie it."))
    return reasons


def _suggested(modules: dict[str, nn.Module]) -> str:
    """Return a hint at what in the model may have been meant."""
    lists = [
        name
        for name, module in modules.items()
        if "expert" in name.rpartition(".")[2] and isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    counted = [name for name, module in modules.items() if isinstance(getattr(module, "num_experts", None), int)]
    if lists:
        return f"{lists[0]} is a {type(modules[lists[0]]).__name__}, whose members are called from outside. "
    if counted:
        return f"{counted[0]} has num_experts, but is not called so. "
    return "No module has num_experts, and none is named experts. "


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
