"""The plan that a run is started with: which of command, job file and script says what.

`Plan.parse` reads all text from here, before anything starts, or where the script calls `paceline.run`. From then on
the plan travels as data: a supervisor sends its `CommandPlan` to each worker in the assignment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline import config
from paceline.errors import PlanError
from paceline.plan.plan import Plan
from paceline.settings import Setting, setting_from_table, setting_to_table, settings_of, with_settings

__all__ = ["CommandPlan", "names_in_plan", "read_plan"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommandPlan:
    """What command and job file say: a whole plan, which wins over the script's, or only some values of it.

    With a whole plan the values of `--set` are in it. Without one they are settings for the plan of the script.
    `is_chosen`: the plan was chosen for plan="auto", from the script's own. `given`: the fields that were written of a
    whole plan, such as "batch.size", defaults among them; None: not known, as of a plan that was made in Python.
    """

    whole: Plan | None = None
    settings: tuple[Setting, ...] = ()
    is_chosen: bool = False
    given: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, plan: Plan | None, overrides: Sequence[str] = (), *, given: tuple[str, ...] | None = None
    ) -> CommandPlan:
        """Read overrides such as "plan.batch.size=64" of a plan; None: of the script's, which only workers run.

        Raises PlanError for what the plan, or any plan, does not take.
        """
        if not overrides:
            return cls(whole=plan, given=given)
        settings = settings_of(plan or Plan(), overrides)
        if plan is not None:
            named = None if given is None else (*given, *(".".join(one.names) for one in settings))
            return cls(whole=with_settings(plan, settings), given=named)
        _refuse_impossible(settings)
        return cls(settings=settings)

    def gives(self, part: str, name: str) -> bool:
        """Whether a value of the whole plan was written: where that is not known, whether it is not the default."""
        if self.whole is None:
            return False
        if self.given is not None:
            return any(one in (part, f"{part}.{name}") or one.startswith(f"{part}.{name}.") for one in self.given)
        return getattr(getattr(self.whole, part), name) != getattr(getattr(Plan(), part), name)

    def over(self, script: Plan | None) -> Plan:
        """Return the plan of the run, where the script's own call has this plan; the command's word wins."""
        return self.whole if self.whole is not None else with_settings(script or Plan(), self.settings)

    def replaced(self, script: Plan) -> str:
        """Return a sentence about the parts of a script's plan that a whole plan replaces; "" where none is."""
        if self.whole is None or self.whole == script or self.is_chosen:
            return ""
        parts = [
            f"{name} is {config.to_short(getattr(self.whole, name))}, not {config.to_short(getattr(script, name))}"
            for name in config.annotations_of(Plan)
            if getattr(self.whole, name) != getattr(script, name)
        ]
        return (
            f"the command's plan replaces the script's as a whole: {'; '.join(parts)}. To change single values of the "
            "script's plan, use --set instead, for example --set plan.batch.size=64"
        )

    @property
    def given_defaults(self) -> tuple[str, ...]:
        """The defaults that were written of a whole plan, as overrides: "plan.batch.size=32". Its text lacks them."""
        found: list[str] = []
        for dotted in self.given or ():
            part, _, name = dotted.partition(".")
            owner = getattr(self.whole, part)
            if name in config.annotations_of(type(owner)) and name not in config.non_defaults(owner):
                found.append(f"plan.{dotted}={config.to_word(getattr(owner, name))}")
        return tuple(found)

    @property
    def settings_text(self) -> str:
        """The settings as one line of text: "plan.batch.size=64, plan.wire.dtype=fp16"."""
        return ", ".join(f"plan.{setting}" for setting in self.settings)

    def __str__(self) -> str:
        if self.whole is not None:
            return str(self.whole)
        return f"(the script's), with {self.settings_text}" if self.settings else "(the script's)"

    def to_table(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        whole = None if self.whole is None else config.to_table(self.whole)
        settings = [setting_to_table(setting) for setting in self.settings]
        given = None if self.given is None else list(self.given)
        return {"whole": whole, "settings": settings, "is_chosen": self.is_chosen, "given": given}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> CommandPlan:
        """Read what `to_table` wrote; every value is checked."""
        whole = None if table["whole"] is None else config.read(Plan, table["whole"], path="plan")
        return cls(
            whole=whole,
            settings=tuple(setting_from_table(Plan, each) for each in table["settings"]),
            is_chosen=bool(table.get("is_chosen", False)),
            given=None if table.get("given") is None else tuple(map(str, table["given"])),
        )


def auto_base(value: object) -> Plan | None:
    """Return the plan beneath "auto", whose layout, micro-batch and recompute are to be chosen before the run: that of
    "batch(size=64)" for "auto+batch(size=64)". None for any other plan.
    """
    if not isinstance(value, str):
        return None
    first, _, rest = value.strip().partition("+")
    return Plan.parse(rest or "default") if first.strip() == "auto" else None


def read_plan(value: object) -> Plan:
    """Return the plan that a value means: a Plan, a line of text, or a table of parts; of "auto" what is beneath."""
    if isinstance(value, Plan):
        return value
    if isinstance(value, str):
        return auto_base(value) or Plan.parse(value)
    if isinstance(value, Mapping):
        return config.read(Plan, value, path="plan")
    raise PlanError(f"plan is {value!r}; it must be a table, or one line of text such as 'replicas=2'.")


def names_in_plan(value: object) -> tuple[str, ...] | None:
    """Return the fields that a value for `read_plan` gives, such as "batch.size"; None: not known, as of a Plan."""
    if isinstance(value, str):
        return Plan.names_in(value if auto_base(value) is None else value.partition("+")[2] or "default")
    if not isinstance(value, Mapping):
        return None
    found: list[str] = []
    for part, fields in value.items():
        names = config.names_in_short(fields) if isinstance(fields, str) else fields
        found += [f"{part}.{name}" for name in names]
    return tuple(found)


def _refuse_impossible(settings: Iterable[Setting]) -> None:
    """Raise PlanError for what no plan takes. The plan that they change is the script's, which only workers read."""
    by_part: dict[str, list[Setting]] = {}
    for setting in settings:
        part, *rest = setting.names
        if rest and rest[0] not in config.annotations_of(type(getattr(Plan(), part))):
            continue  # a part of several kinds: the script says which
        by_part.setdefault(part, []).append(setting)
    for part, own in by_part.items():
        try:
            with_settings(Plan(), own)
        except PlanError:
            if not any(_takes(plan, own) for plan in _plans_beside(part)):
                raise


def _plans_beside(part: str) -> Iterator[Plan]:
    """The default plan with another value in one field of a part: some settings are of use only beside such a one."""
    default = getattr(Plan(), part)
    for name, annotation in config.annotations_of(type(default)).items():
        value = getattr(default, name)
        others = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
        for other in (value + 1,) if type(value) is int else others:
            with contextlib.suppress(PlanError):
                yield dataclasses.replace(Plan(), **{part: dataclasses.replace(default, **{name: other})})


def _takes(plan: Plan, settings: Sequence[Setting]) -> bool:
    try:
        with_settings(plan, settings)
    except PlanError:
        return False
    return True
