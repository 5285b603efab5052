"""The syntax trees of the package's files, read once for all tests of a process that look through them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["PACKAGE", "nodes", "sources"]

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "paceline"


@functools.cache
def sources() -> tuple[Path, ...]:
    """All files of the package, in order."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All that is in a file, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))
