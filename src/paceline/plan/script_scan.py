"""Reads in a script's text how many workers its own `paceline.run(...)` asks for, without running it.

The command starts workers before any of them runs the script, so it has to know then. What is written out is read:
`workers=4`, `plan="replicas=2-4"`, `plan=Plan(layout=Layout(replicas=(2, 4)))`, also by names that are assigned once.
A number that the script computes is not guessed: the user is asked for it, before anything starts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import config
from paceline.errors import PlanError
from paceline.plan.command_plan import auto_base, read_plan
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.settings import Setting, with_settings
from paceline.units import shell_text

__all__ = ["auto_plan_of_script", "cluster_of_script", "computed_plan", "layout_of_script", "workers_of_script"]

CALLS = ("paceline.run", "run")


def workers_of_script(
    script: Path, settings: Sequence[Setting] = (), *, args: Sequence[str] = (), say: Callable[[str], None]
) -> int | None:
    """Return how many workers the script begins with; None where it leaves that open, or cannot be read.

    `settings` change its plan (`plan.layout.replicas=2-4`); `args` are the script's own, for the command that is to be
    typed. PlanError where it computes the number, or the layout that says it; a plan of which nothing can be seen here
    may want no number, so that is only said.
    """
    try:
        text = _ScriptTree(ast.parse(script.read_bytes()))
    except (SyntaxError, ValueError):
        return None  # the worker that runs it tells the user, with the line
    command = shell_text("paceline", "run", str(script), "--workers", "N", *args)
    call = text.first_call(CALLS)
    given = {} if call is None else _keywords(call)
    try:
        workers = text.value(given["workers"]) if "workers" in given else None
        if isinstance(workers, int):
            return workers
        layout = text.layout(given["plan"]) if "plan" in given else None
    except _Computed as computed:
        raise PlanError(
            f"{script} computes how many workers it wants ({computed}), and workers are started before it runs. "
            f"Say with how many to begin: {command}"
        ) from None
    own = [setting for setting in settings if setting.names[0] == "layout"]
    if own:
        layout = with_settings(Plan(layout=layout or Layout()), own).layout
    elif layout is None and "plan" in given and not text.is_none(given["plan"]):
        say(
            f"{script} computes its plan ({ast.unparse(given['plan'])}), so how many workers it wants is unknown here: "
            f"where it wants more than one, say so: {command}"
        )
    return None if layout is None else layout.workers


def layout_of_script(script: Path, settings: Sequence[Setting] = ()) -> Layout | None:
    """Return the layout that the script's own call writes out, with the settings that change it; None where it does
    not, or cannot be read."""
    try:
        text = _ScriptTree(ast.parse(script.read_bytes()))
        call = text.first_call(CALLS)
        given = {} if call is None else _keywords(call)
        layout = text.layout(given["plan"]) if "plan" in given else None
    except (OSError, SyntaxError, ValueError, _Computed):
        return None
    own = [setting for setting in settings if setting.names[0] == "layout"]
    return with_settings(Plan(layout=layout or Layout()), own).layout if own else layout


def computed_plan(script: Path) -> str | None:
    """Return the source of the plan of the script's own call where its layout cannot be read off the text; None where
    it can, or where the call has no plan.
    """
    try:
        text = _ScriptTree(ast.parse(script.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return None  # as in `workers_of_script`
    call = text.first_call(CALLS)
    given = {} if call is None else _keywords(call)
    if "plan" not in given or text.is_none(given["plan"]):
        return None
    try:
        is_there = text.layout(given["plan"]) is not None
    except _Computed:
        is_there = False
    return None if is_there else ast.unparse(given["plan"])


def auto_plan_of_script(script: Path) -> str | None:
    """Return the text of the plan that the script's own call writes out, where it begins with "auto"."""
    plan = _text_in_call(script, "plan")
    return plan if auto_base(plan) is not None else None


def cluster_of_script(script: Path) -> str | None:
    """Return the cluster that the script's own call writes out; None where it does not, or cannot be read."""
    return _text_in_call(script, "cluster")


def _text_in_call(script: Path, name: str) -> str | None:
    """The text that the script's own call writes out for one parameter."""
    try:
        text = _ScriptTree(ast.parse(script.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return None
    call = text.first_call(CALLS)
    given = {} if call is None else _keywords(call)
    return text.text(given[name]) if name in given else None


class _Computed(Exception):
    """A value that only running the script would tell; the message is its source."""


class _ScriptTree:
    """A script as its syntax tree, in which names stand for what they are assigned."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._times: dict[str, int] = {}  # that a name is bound
        self._assigned: dict[str, ast.expr] = {}
        for node in self._nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self._times[name] = self._times.get(name, 0) + 1
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assigned[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._assigned[name] = value
                case _:
                    pass

    def first_call(self, names: Sequence[str]) -> ast.Call | None:
        calls = (node for node in self._nodes if isinstance(node, ast.Call))
        return next((call for call in calls if ast.unparse(call.func) in names), None)

    def value(self, node: ast.expr) -> object:
        """A constant that is written out; _Computed where it is not."""
        try:
            return ast.literal_eval(self._meant(node))
        except (ValueError, TypeError):
            raise _Computed(ast.unparse(node)) from None

    def is_none(self, node: ast.expr) -> bool:
        """Whether it is None, as written out."""
        meant = self._meant(node)
        return isinstance(meant, ast.Constant) and meant.value is None

    def text(self, node: ast.expr) -> str | None:
        """The text that is written out, or None."""
        meant = self._meant(node)
        return meant.value if isinstance(meant, ast.Constant) and isinstance(meant.value, str) else None

    def layout(self, node: ast.expr) -> Layout | None:
        """The layout of a plan; None where the plan comes from elsewhere, so that nothing is known of it.

        _Computed where a layout is there, and its numbers are not.
        """
        match plan := self._meant(node):
            case ast.Constant(value=str(text)):
                return read_plan(text).layout
            case ast.Call(func=function) if ast.unparse(function) in ("Plan", "paceline.Plan"):
                given = _keywords(plan)
                return self._layout(given["layout"]) if "layout" in given else Layout()
            case _:
                return None

    def _layout(self, node: ast.expr) -> Layout | None:
        layout = self._meant(node)
        if not isinstance(layout, ast.Call) or ast.unparse(layout.func) not in ("Layout", "paceline.Layout"):
            return None
        given = _keywords(layout)
        if "replicas" not in given:
            return Layout()
        try:
            fields = {name: self.value(value) for name, value in given.items()}
        except _Computed:
            raise _Computed(ast.unparse(layout)) from None
        return config.read(Layout, fields)

    def _meant(self, node: ast.expr) -> ast.expr:
        """What a name stands for, where it is assigned once; otherwise the node itself."""
        seen: set[str] = set()
        while isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            if self._times.get(node.id) == 1:
                node = self._assigned.get(node.id, node)
        return node


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
