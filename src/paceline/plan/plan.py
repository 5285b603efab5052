"""A Plan is everything about a run that can change its numbers or the bytes it moves: six parts, each with a default.

As text it is one line, short and safe as a file name, and it reads back to the same plan:

    replicas=4+cast(dtype=bf16)+batch(size=512,micro=8)+compute(precision=bf16)

Terms are joined by "+", in any order. A term is a part in its short form, or field=value for a field of the layout.
Defaults are left out; the plan of defaults alone is "default".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from paceline import config
from paceline.errors import PlanError
from paceline.plan.batch import Batch
from paceline.plan.compute import Compute
from paceline.plan.guard import Guard
from paceline.plan.layout import Layout
from paceline.plan.layout_rules import LAYOUT_RULES
from paceline.plan.part import PlanPart
from paceline.plan.rules import BrokenRule, PlanFacts, broken_rules
from paceline.plan.sync import AllReduce, Gossip, LocalSGD, ParameterServer, Sync
from paceline.plan.sync_rules import SYNC_RULES
from paceline.plan.wire import Raw, Wire

__all__ = ["RULES", "Plan"]

DEFAULT = "default"
LONGEST = 4000  # characters of a plan's text
RULES = (*LAYOUT_RULES, *SYNC_RULES)
PLUS_OUTSIDE_BRACKETS = re.compile(r"\+(?![^()]*\))")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(PlanPart):
    """All that can change a run's numbers or the bytes that it moves: layout, sync, wire, batch, compute, guard.

    Each part has a default, and each field is given by name. A plan is frozen, and prints as Python to paste. Raises
    PlanError for a value that is not legal, with the legal ones and the remedy. Rules between parts and with the number
    of workers are checked by `check` and `require`.

    Example::

        plan = paceline.Plan(layout=paceline.Layout(replicas=4), wire=paceline.Cast(dtype="bf16"))
        assert str(plan) == "replicas=4+cast(dtype=bf16)"
        assert paceline.Plan.parse(str(plan)) == plan
        assert plan.check(workers=4) == ()
    """

    layout: Layout = dataclasses.field(default_factory=Layout)
    sync: Sync = dataclasses.field(default_factory=AllReduce)
    wire: Wire = dataclasses.field(default_factory=Raw)
    batch: Batch = dataclasses.field(default_factory=Batch)
    compute: Compute = dataclasses.field(default_factory=Compute)
    guard: Guard = dataclasses.field(default_factory=Guard)

    def __post_init__(self) -> None:
        config.check_fields(self)

    def __str__(self) -> str:
        """One line that `Plan.parse` reads back; only letters, digits and "+-_.,=()%"."""
        terms: list[str] = []
        for part in config.non_defaults(self).values():
            short = config.to_short(part)
            if isinstance(part, Layout):
                terms += short.removeprefix("layout(").removesuffix(")").split(",")
            else:
                terms.append(short)
        return "+".join(terms) or DEFAULT

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that one line of text describes; PlanError names the term that is wrong and what is legal."""
        if not text.strip():
            raise PlanError(
                f"The plan is empty text; write {DEFAULT!r} for the plan of defaults, or for example 'replicas=2'."
            )
        if len(text) > LONGEST:
            raise PlanError(
                f"The plan has {len(text)} characters; {LONGEST} are the most. Its text is {text[:60]!r}..."
            )
        if text.strip() == DEFAULT:
            return cls()
        parts: dict[str, Any] = {}
        layout: dict[str, str] = {}
        for name, value in _terms(text):
            if name not in config.annotations_of(cls):
                _require_once(name, layout, text)
                layout[name] = value
                continue
            _require_once(name, parts, text)
            parts[name] = config.read_short(value, config.annotations_of(cls)[name], path=f"plan.{name}")
        if layout:
            _require_once("layout", parts, text)
            parts["layout"] = _read_layout(layout)
        return cls(**parts)

    @staticmethod
    def names_in(text: str) -> tuple[str, ...]:
        """Return the fields that a plan's text gives, defaults too: "batch.size" of "batch(size=32)". Raises PlanError
        for a term that no plan has."""
        if text.strip() == DEFAULT:
            return ()
        parts = config.annotations_of(Plan)
        return tuple(
            f"{part}.{name}"
            for term, value in _terms(text)
            for part, names in [(term, config.names_in_short(value)) if term in parts else ("layout", (term,))]
            for name in names
        )

    @property
    def keeps_snapshots(self) -> bool:
        """Whether every worker's state also lies in memory that outlives it, where a supervisor has started it."""
        every = self.guard.snapshot_every
        return self.layout.workers_each > 1 if every is None else every > 0

    @property
    def is_local(self) -> bool:
        """Whether replicas take steps by themselves, so that their weights differ until they agree."""
        return isinstance(self.sync, LocalSGD | Gossip)

    @property
    def is_asynchronous(self) -> bool:
        """Whether each replica gets its next batch, or share of one, by itself, and some need not wait for all."""
        return isinstance(self.sync, ParameterServer) and (self.sync.staleness != 0 or self.has_backup_workers)

    @property
    def has_backup_workers(self) -> bool:
        """Whether a step is taken without the slowest replicas' shares."""
        return isinstance(self.sync, ParameterServer) and self.sync.drop > 0

    def check(self, *, workers: int | None = None) -> tuple[BrokenRule, ...]:
        """Return all rules that this plan breaks with `workers` workers, each with its remedy; an empty tuple: none.

        Rules about what is not given hold. Raises nothing.
        """
        return broken_rules(PlanFacts(plan=self, workers=workers), RULES)

    def require(self, *, workers: int | None = None) -> None:
        """Raise one PlanError that lists all rules that this plan breaks with `workers` workers, with remedies."""
        broken = self.check(workers=workers)
        if len(broken) == 1:
            raise PlanError(str(broken[0]))
        if broken:
            raise PlanError("\n  - ".join([f"The plan breaks {len(broken)} rules:", *map(str, broken)]))

    def resolve(self, workers: int) -> Plan:
        """Return this plan with nothing left open: the number of replicas and the micro-batch filled in."""
        layout = self.layout
        if layout.replicas is None:
            layout = dataclasses.replace(layout, replicas=max(1, workers // layout.workers_each))
        batch = dataclasses.replace(self.batch, micro=self.batch.resolved_micro)
        return dataclasses.replace(self, layout=layout, batch=batch)


def _terms(text: str) -> Iterator[tuple[str, str]]:
    """The terms of a plan's text: a field of Plan and its short form, or another name and its value."""
    for term in map(str.strip, PLUS_OUTSIDE_BRACKETS.split(text)):
        name, equals, value = map(str.strip, term.partition("="))
        yield (_field_of(term, text), term) if not equals or "(" in name else (name, value)


def _read_layout(fields: dict[str, str]) -> Layout:
    """Make the layout from the bare terms field=value; one that belongs to another part is sent there."""
    legal = config.annotations_of(Layout)
    for name, value in fields.items():
        if name not in legal and not Layout.refusal(name, value):
            raise config.unknown_name(Plan, name, value, path="plan")
    return config.read_short(
        f"layout({','.join(f'{name}={value}' for name, value in fields.items())})", Layout, path="plan.layout"
    )


def _require_once(name: str, seen: dict[str, Any], text: str) -> None:
    if name in seen:
        raise PlanError(f"The plan {text!r} gives {name} twice; give it once.")


def _field_of(term: str, text: str) -> str:
    """Return which field of Plan a term such as "cast(dtype=bf16)" is for."""
    name = term.partition("(")[0].strip()
    folded = name.replace("_", "").lower()
    known: list[str] = []
    for field, annotation in config.annotations_of(Plan).items():
        for choice in config.choices(annotation):
            if choice.lower() == folded:
                return field
            known.append(choice.lower())
    if folded == "auto":
        raise PlanError(
            f"plan='auto': a planner that chooses the plan is not built yet. Use {DEFAULT!r}, or write the plan."
        )
    legal = ", ".join(known)
    raise PlanError(
        f"The plan {text!r} has a term {term!r} that is none of {legal}, nor replicas=n.{config.suggest(name, known)}"
    )
