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
from typing import Any

import torch
from torch import nn

from paceline.errors import PlanError
from paceline.parallel.recompute import repeated_blocks
from paceline.schedule.order import mix

__all__ = ["Unit", "find_units", "replaced_forward", "seed_generators", "seeded_units"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unit:
    """A module with its name in the model."""

    name: str
    module: nn.Module


def find_units(model: nn.Module, *, named: Sequence[str] = ()) -> list[Unit]:
    """Return the units of `model` in order of registration; `named` modules are units, whatever they contain.

    Raises PlanError where a name is not that of a module with parameters, or lies inside another one.
    """
    modules = dict(model.named_modules())
    _check_names(model, modules, named)
    chosen = {modules[name] for name in named}
    blocks = {block for _, block in repeated_blocks(model) if not isinstance(block, CONTAINERS)}
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[Unit]:
        if module in seen:  # registered under two names: the first one counts
            return
        seen.add(module)
        is_unit = module in chosen or (module in blocks and not _contains(module, chosen))
        if not is_unit and (module is model or isinstance(module, CONTAINERS) or _contains(module, chosen | blocks)):
            for child_name, child in module.named_children():
                yield from walk(f"{name}.{child_name}" if name else child_name, child)
        elif any(True for _ in module.parameters()):
            yield Unit(name=name, module=module)

    return list(walk("", model))


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
    units: Sequence[Unit], replace: Callable[[int, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """While it lasts, calling unit k runs `replace(k, its forward)`; what the modules had is put back afterwards."""
    former = [unit.module.__dict__.get("forward") for unit in units]
    try:
        for index, unit in enumerate(units):
            unit.module.forward = replace(index, unit.module.forward)
        yield
    finally:
        for unit, forward in zip(units, former, strict=True):
            if forward is None:
                unit.module.__dict__.pop("forward", None)
            else:
                unit.module.forward = forward


@contextlib.contextmanager
def seeded_units(units: Sequence[Unit], *seed: int) -> Iterator[None]:
    """Give each call of a unit its own random numbers: those of (seed, number of the call), wherever it runs.

    The generators are seeded when the call begins, and again when it ends, so what follows does not depend on how many
    numbers the unit drew. One process with this draws what stages with the same seed draw.
    """
    calls = 0
    depth = 0

    def replace(_: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, depth
            if depth:  # a unit that another one calls is part of it
                return forward(*args, **kwargs)
            calls += 1
            seed_generators(*seed, calls, 0)
            number, depth = calls, 1
            try:
                return forward(*args, **kwargs)
            finally:
                depth = 0
                seed_generators(*seed, number, 1)

        return call

    seed_generators(*seed, 0, 1)
    with replaced_forward(units, replace):
        yield


def seed_generators(*numbers: int) -> None:
    """Seed what modules draw from: torch on the CPU and on CUDA, and Python's `random`."""
    seed = mix(*numbers)
    torch.random.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
