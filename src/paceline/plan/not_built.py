"""Words of the plan that are not built yet: each is refused by name, and the message says what to use now.

Building one of them removes its row here and adds a field or a legal value.
"""

from __future__ import annotations

import re

__all__ = ["field"]

# Fields of a part, and single values of a field ("Field=value"): what it is, what to use now.
FIELDS = {
    "Compute.precision=fp16": (
        "fp16 arithmetic (it needs loss scaling)",
        "precision='bf16', which needs none, or precision='fp32'",
    ),
    "Compute.precision=fp8": ("fp8 arithmetic", "precision='bf16'"),
}


def field(cls: str, name: str, value: object) -> str | None:
    """Return why field `name` of class `cls`, or this value of it, is refused; None where the tables do not have it."""
    row = FIELDS.get(f"{cls}.{name}") or FIELDS.get(f"{cls}.{name}={value}")
    return f"{cls}({name}={_shown(value)}): {row[0]} is not built yet. Use {row[1]}." if row else None


def _shown(value: object) -> str:
    """As Python would write it; a number that came as text needs no quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"[\d.-]+|true|false", value) else repr(value)
