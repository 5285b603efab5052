"""What an error to plant is, and how it is planted: it must say that it took effect, or the trial of it does not count.

Each error is a change of one function of the package, made in the workers of a configuration. A function that is gone
raises AttributeError there. `took_effect` leaves a mark where the changed function has done something else than before.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layout_runs import workers_of
from paceline.plan import Plan
from planted.programs import Program, text

__all__ = [
    "ALL",
    "Plant",
    "PlantedError",
    "after_land",
    "bound",
    "marks_in",
    "replaced",
    "result",
    "took_effect",
    "wrap",
]

Plant = Callable[[Any], None]  # changes the package in one worker, which it is given
ALL = ("model",)  # expected where an error is of the whole step
MARK = "took_effect_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedError:
    """One error: what it is, under which plan, how it is planted, and which modules may be named for it."""

    what: str
    plan: str
    plant: Plant
    expected: tuple[str, ...]  # patterns, as in a file's name
    program: Program = text
    reference: Program | None = None  # None: the same program
    is_early: bool = False  # planted before the model is prepared, whose checks see it; else before the first batch

    @property
    def workers(self) -> int:
        return workers_of(Plan.parse(self.plan).layout)


class _Trial:
    """Where the running trial leaves its marks; workers are forked from the process that sets it."""

    directory: Path | None = None


def marks_in(directory: Path) -> Callable[[], list[str]]:
    """Have workers that are forked from now on leave their marks here; returns what lists them."""
    _Trial.directory = directory
    directory.mkdir(parents=True, exist_ok=True)
    return lambda: [path.name for path in directory.glob(f"{MARK}*")]


def took_effect() -> None:
    """Called where a planted function does something else than the one that it replaces."""
    if _Trial.directory is not None:
        (_Trial.directory / f"{MARK}{os.getpid()}").touch()


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function, which must exist, by what `make` makes of it. That calls `took_effect`."""
    setattr(owner, name, make(getattr(owner, name)))


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Plant:
    """Another function in place of one that exists."""

    def make(_: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            return function(*args, **kwargs)

        return call

    return lambda _: wrap(owner, name, make)


def result(owner: Any, name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what a function returns."""

    def make(before: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            took_effect()
            return change(before(*args, **kwargs))

        return call

    return lambda _: wrap(owner, name, make)


def after_land(change: Callable[[Any, Any], None]) -> Plant:
    """Change the gradients after the sum: change(worker, {name: parameter})."""
    from paceline.sync.allreduce.gradient_reducer import GradientReducer

    def plant(worker: Any) -> None:
        def make(before: Any) -> Any:
            def land(gradients: Any, *, scale: float) -> None:
                before(gradients, scale=scale)
                named = zip(gradients.names, gradients.parameters, strict=True)
                change(worker, {name: one for name, one in named if one.grad is not None})

            return land

        wrap(GradientReducer, "land", make)

    return plant


def bound(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by their names, however they were given."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)
