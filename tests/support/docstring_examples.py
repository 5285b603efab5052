"""Examples in docstrings: what stands indented below a line `Example::`."""

from __future__ import annotations

import inspect
import textwrap

__all__ = ["example"]


def example(thing: object) -> str:
    """Return the code of an object's example; "" if its docstring has none."""
    _, _, below = (inspect.getdoc(thing) or "").partition("Example::\n\n")
    lines: list[str] = []
    for line in below.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()
