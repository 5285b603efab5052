"""What all parts of a Plan have in common: they name what they refuse, and print themselves as Python to paste.

Settings that are planned but not built yet are refused by name, with what to use now. Building one of them removes its
row here and adds a field or a legal value.
"""

from __future__ import annotations

import re
from typing import Any, Self

from paceline import config
from paceline.errors import PlanError
from paceline.plan import part

__all__ = ["PlanPart", "not_built_reason"]


class PlanPart:
    """Base of Plan and of all that is in it, which are frozen, keyword-only, slotted dataclasses with `repr=False`."""

    __slots__ = ()

    def __new__(cls, *args: object, **fields: object) -> Self:
        """Refuse positional values and unknown names in the user's words, before the generated `__init__` sees them."""
        legal = config.annotations_of(cls)
        if args:
            named = next(iter(legal), None)
            example = f"{cls.__name__}({named}={args[0]!r})" if named else f"{cls.__name__}()"
            raise PlanError(f"{cls.__name__} takes its settings by name: write {example}.")
        for name, value in fields.items():
            if name not in legal:
                raise config.unknown_name(cls, name, value, path=cls.__name__)
        config.require_all(cls, fields, path=cls.__name__)
        return super().__new__(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle through the constructor, so that what comes from elsewhere is checked, too."""
        return _remade, (type(self), {name: getattr(self, name) for name in config.annotations_of(type(self))})

    def __repr__(self) -> str:
        return config.to_python(self)

    @classmethod
    def refusal(cls, name: str, value: object) -> str | None:
        """Return why `name` (a field, or its value) is refused; None where it is unknown."""
        return part.not_built_reason(cls.__name__, name, value)


def _remade(cls: type[PlanPart], fields: dict[str, Any]) -> PlanPart:
    return cls(**fields)


# Fields of a part, and single values of a field ("Field=value"): what it is, what to use now.
NOT_BUILT: dict[str, tuple[str, str]] = {}


def not_built_reason(cls: str, name: str, value: object) -> str | None:
    """Return why field `name` of class `cls`, or this value of it, is refused; None where the tables do not have it."""
    row = NOT_BUILT.get(f"{cls}.{name}") or NOT_BUILT.get(f"{cls}.{name}={value}")
    return f"{cls}({name}={_shown(value)}): {row[0]} is not built yet. Use {row[1]}." if row else None


def _shown(value: object) -> str:
    """As Python would write it; a number that came as text needs no quotes."""
    return value if isinstance(value, str) and re.fullmatch(r"[\d.-]+|true|false", value) else repr(value)
