"""Finds in a module's text where it uses names of frameworks: full names by its imports, methods by what calls return.

A name that is assigned from a known call, `accelerator = Accelerator()` or `self.engine, *_ = deepspeed.initialize()`,
stands for an object of the class that the tables give. Everything else is read from the text alone: what a program
makes up as it runs is not seen.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator

from paceline.plan.program_text import ModuleText

__all__ = ["NameUse", "uses_in"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NameUse:
    """One place in the text where a full name is used."""

    line: int
    path: str  # "torch.distributed.all_reduce"
    text: str  # as the program has it: "dist.all_reduce"
    call: ast.Call | None = None  # where it is called there


def uses_in(module: ModuleText, *, class_of: Callable[[str], str | None]) -> Iterator[NameUse]:
    """Yield all uses of imported names, in the order of lines; the longest chain of attributes each.

    `class_of` gives the class of what a call of a full name returns.
    """
    names = _imported(module.tree)
    names |= _assigned(module.tree, names, class_of)
    calls = {id(node.func): node for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    found: list[NameUse] = []
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in inner and isinstance(node.ctx, ast.Load):
            path = _full_name(node, names)
            if path is not None:
                found.append(NameUse(line=node.lineno, path=path, text=ast.unparse(node), call=calls.get(id(node))))
    yield from sorted(found, key=lambda use: use.line)


def _imported(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _assigned(tree: ast.Module, names: dict[str, str], class_of: Callable[[str], str | None]) -> dict[str, str]:
    """What names and attributes stand for that are assigned from known calls, or from known names."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        targets, value = _assignment(node)
        if value is None:
            continue
        if isinstance(value, ast.Call):
            called = _full_name(value.func, names)
            meant = None if called is None else class_of(called)
        else:
            meant = _full_name(value, names) if isinstance(value, (ast.Attribute, ast.Name)) else None
        for target in targets:
            first = target.elts[0] if isinstance(target, (ast.Tuple, ast.List)) and target.elts else target
            if meant is not None and isinstance(first, (ast.Name, ast.Attribute)):
                found[ast.unparse(first)] = meant
    return found


def _assignment(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    match node:
        case ast.Assign(targets=targets, value=value):
            return targets, value
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            return [target], value
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            return [target], value
        case _:
            return [], None


def _full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full name of a chain of attributes whose beginning is known; None elsewhere."""
    behind: list[str] = []
    while True:
        if isinstance(node, (ast.Attribute, ast.Name)):
            known = names.get(ast.unparse(node))
            if known is not None:
                return ".".join([known, *reversed(behind)])
        if not isinstance(node, ast.Attribute):
            return None
        behind.append(node.attr)
        node = node.value
