"""The units of a model: the modules that are placed, recomputed or sharded as a whole.

A unit is a repeated block (a layer of a Transformer, a block of a ResNet), or another module with parameters beside the
blocks: an embedding, the last norm, the head. No unit is inside another. What is left over (containers, the model
itself, modules without parameters such as rotary embeddings) is the *root*: its code joins the units together, and
every worker can run it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.recompute import repeated_blocks
from paceline.schedule.sample_order import mix

__all__ = [
    "ModelUnit",
    "UnitRandomness",
    "blocks_of",
    "find_units",
    "names_matching",
    "replaced_forward",
    "seeded_units",
]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelUnit:
    """A module with its name in the model."""

    name: str
    module: nn.Module


def find_units(model: nn.Module, *, named: Sequence[str] = ()) -> list[ModelUnit]:
    """Return the units of `model` in order of registration; `named` modules are units, whatever they contain.

    Raises PlanError where a name is not that of a module with parameters, or lies inside another one.
    """
    modules = dict(model.named_modules())
    _check_names(model, modules, named)
    chosen = {modules[name] for name in named}
    blocks = {block for _, block in repeated_blocks(model) if not isinstance(block, CONTAINERS)}
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[ModelUnit]:
        if module in seen:  # registered under two names: the first one counts
            return
        seen.add(module)
        is_unit = module in chosen or (module in blocks and not _contains(module, chosen))
        if not is_unit and (module is model or isinstance(module, CONTAINERS) or _contains(module, chosen | blocks)):
            for child_name, child in module.named_children():
                yield from walk(f"{name}.{child_name}" if name else child_name, child)
        elif any(True for _ in module.parameters()):
            yield ModelUnit(name=name, module=module)

    return list(walk("", model))


def names_matching(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the modules that are to be units, in order of registration: "layers.*" is all of layers' own
    members, and "*" stands for one part of a name, or a piece of it.

    Raises PlanError with all that is wrong: patterns that no module has, modules without parameters or without a
    forward, and units inside of units.
    """
    modules = dict(model.named_modules())
    found = [name for name in modules if any(_matches(name, pattern) for pattern in patterns)]
    idle = [pattern for pattern in patterns if not any(_matches(name, pattern) for name in modules)]
    if idle:
        held = (name for name, module in modules.items() if name and any(True for _ in module.parameters()))
        known = dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in held)
        raise PlanError(
            f"units={', '.join(map(repr, idle))} {'names' if len(idle) == 1 else 'name'} no module of "
            f"{type(model).__name__}, which has {', '.join(known) or 'none with parameters'}."
        )
    _check_names(model, modules, found)
    lists = [name for name in found if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict))]
    if lists:
        raise PlanError(
            f"{lists[0]} of {type(model).__name__} is a {type(modules[lists[0]]).__name__}, which has no forward, and "
            f"so it cannot be a unit: name its members, {lists[0] + '.*'!r}."
        )
    return tuple(found)


def blocks_of(model: nn.Module, named: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return the modules with their names that are gathered, or recomputed, as a whole: those that the user has named,
    or else the repeated blocks."""
    modules = dict(model.named_modules())
    return [(name, modules[name]) for name in named] if named else repeated_blocks(model)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _contains(module: nn.Module, others: set[nn.Module]) -> bool:
    return any(inner in others for inner in module.modules() if inner is not module)


def _check_names(model: nn.Module, modules: dict[str, nn.Module], named: Sequence[str]) -> None:
    wrong = []
    for name in named:
        if not name or name not in modules:
            wrong.append(f"{name!r} is no module of {type(model).__name__}")
        elif not any(True for _ in modules[name].parameters()):
            wrong.append(f"{name!r} has no parameters")
        elif inside := [other for other in named if other and name.startswith(f"{other}.")]:
            wrong.append(f"{name!r} is inside {inside[0]!r}")
    if wrong:
        raise PlanError(
            f"These cannot be units of {type(model).__name__}: {'; '.join(wrong)}. "
            "Name modules as model.named_modules() does, none inside another."
        )


@contextlib.contextmanager
def replaced_forward(
    units: Sequence[ModelUnit], replace: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """While it lasts, calling unit k runs `replace(k, its forward)`; what the modules had is put back afterwards."""
    # Not by setattr: that of a module looks through all that it has, and this is done for every micro-batch.
    former = [unit.module.__dict__.get("forward") for unit in units]
    try:
        for index, unit in enumerate(units):
            unit.module.__dict__["forward"] = replace(index, unit.module.forward)
        yield
    finally:
        for unit, forward in zip(units, former, strict=True):
            if forward is None:
                unit.module.__dict__.pop("forward", None)
            else:
                unit.module.__dict__["forward"] = forward


class UnitRandomness:
    """The random numbers of a forward: each call of a unit draws those of (seed, number of the call), wherever it runs.

    Where code `between` units draws, too, torch's generators are seeded when a call begins, and again when it ends, so
    what follows does not depend on how many numbers the unit drew. Python's `random` goes on between units as if no
    unit had drawn: seeding it costs more than a unit that is elsewhere may cost.
    """

    def __init__(self, *seed: int, between: bool = True) -> None:
        self._seed, self._num_calls, self._between = mix(*seed), 0, between
        if between:
            random.seed(self._seed)
            self._seed_torch(0, after=True)

    def pass_by(self) -> None:
        """Go on as after a unit's call, which happens elsewhere."""
        self._num_calls += 1
        if self._between:
            self._seed_torch(self._num_calls, after=True)

    @contextlib.contextmanager
    def unit(self, again: int | None = None) -> Iterator[int]:
        """While it lasts, a unit's call draws its own numbers; gives the call's number. `again`: the number of an
        earlier call, which is run once more."""
        if again is None:
            self._num_calls += 1
        number = self._num_calls if again is None else again
        state = random.getstate() if self._between else None
        random.seed(self._seed_torch(number))
        try:
            yield number
        finally:
            if state is not None:
                random.setstate(state)
                self._seed_torch(self._num_calls, after=True)

    def _seed_torch(self, number: int, *, after: bool = False) -> int:
        """Seed what modules draw from, on the CPU and on CUDA, in a call or after it; returns the seed."""
        seed = mix(self._seed, number, int(after))
        torch.random.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
        return seed


@contextlib.contextmanager
def seeded_units(units: Sequence[ModelUnit], *seed: int) -> Iterator[Callable[[], None]]:
    """Give each call of a unit its own random numbers: one process then draws what stages with the same seed draw.

    Gives a function that says that the forward is over: from then on calls are those of `torch.utils.checkpoint`, which
    draw again what the unit's last call drew, then the one before.
    """
    draws, is_inside, is_over = UnitRandomness(*seed), False, False
    numbers: list[list[int]] = [[] for _ in units]  # of each unit's calls

    def replace(place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # a unit that another one calls is part of it
                return forward(*args, **kwargs)
            again = numbers[place].pop() if is_over and numbers[place] else None
            is_inside = True
            try:
                with draws.unit(again) as number:
                    if not is_over:
                        numbers[place].append(number)
                    return forward(*args, **kwargs)
            finally:
                is_inside = False

        return call

    def end_forward() -> None:
        nonlocal is_over
        is_over = True

    with replaced_forward(units, replace):
        yield end_forward
