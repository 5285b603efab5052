"""The tables of names: one TOML file for each framework beside this one, in the order in which a program is given one.

A table watches some modules. Each name below them has a verdict: it works (with a remark, or ""), it has a counterpart,
or it is refused; for a module's name it is that of all below it. `otherwise` is for names that are not listed: "works",
or why they are refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline import config

__all__ = ["FRAMEWORKS", "WORKS", "CallVerdict", "FrameworkTable", "framework_tables"]

FRAMEWORKS = ("tensorflow", "horovod", "deepspeed", "accelerate", "keras", "torch")
WORKS = "works"

CallVerdictKind = Literal["works", "counterpart", "refused"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallVerdict:
    """What becomes of a call."""

    kind: CallVerdictKind
    says: str  # a remark on what works, the counterpart, or why it is refused


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkTable:
    """The names of one framework."""

    name: str
    watched: tuple[str, ...]  # full names, below which each use counts
    here: str  # the module that has the names which work
    start: str  # the command; {script} stands for the program
    otherwise: str
    module: str = ""  # below which the tables' names are; "": they are full names
    change: tuple[str, ...] = ()  # the line that changes: before, after
    works: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    counterpart: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    returns: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # call -> class of what it returns
    methods: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # of any object -> the counterpart

    def watches(self, path: str) -> bool:
        """Whether a full name is one of the framework's distributed ones."""
        return any(path == one or path.startswith(f"{one}.") for one in self.watched)

    def verdict(self, path: str) -> CallVerdict:
        """What becomes of the use of a full name: of itself, or of the longest name above it that is listed."""
        parts = self.own_name(path).split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if name in self.refused:
                return CallVerdict(kind="refused", says=self.refused[name])
            if name in self.counterpart:
                return CallVerdict(kind="counterpart", says=self.counterpart[name])
            if name in self.works and not self._has_listed_methods(name, parts, length):
                return CallVerdict(kind="works", says=self.works[name])
        if self.otherwise == WORKS:
            return CallVerdict(kind="works", says="")
        return CallVerdict(kind="refused", says=self.otherwise)

    def lists(self, path: str) -> bool:
        """Whether the tables have this very name."""
        name = self.own_name(path)
        return name in self.works or name in self.counterpart or name in self.refused

    def own_name(self, path: str) -> str:
        """A full name as the tables have it."""
        for prefix in (self.module, self.here):
            if self.module and path.startswith(f"{prefix}."):
                return path.removeprefix(f"{prefix}.")
        return path

    def class_of(self, path: str) -> str | None:
        """The class of what a call of a full name returns, as a full name; None where it is not known."""
        found = self.returns.get(self.own_name(path))
        base = self.here if path.startswith(f"{self.here}.") else self.module
        return None if found is None else f"{base}.{found}"

    def _has_listed_methods(self, name: str, parts: list[str], length: int) -> bool:
        """Whether `name` is a class with listed methods, and the use one of its other methods."""
        return length < len(parts) and name in self.returns.values()


@functools.cache
def framework_tables() -> tuple[FrameworkTable, ...]:
    """Read all tables."""
    folder = Path(__file__).parent
    return tuple(_read(config.load_toml(folder / f"{name}.toml")) for name in FRAMEWORKS)


def _read(fields: dict[str, Any]) -> FrameworkTable:
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()}
    return FrameworkTable(**values)
