"""What all parts of a Plan share: they name what they refuse, and print themselves as Python to paste."""

from __future__ import annotations

from typing import Any, Self

from paceline import config
from paceline.errors import PlanError
from paceline.plan import not_built

__all__ = ["Part"]


class Part:
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
        return not_built.field(cls.__name__, name, value)


def _remade(cls: type[Part], fields: dict[str, Any]) -> Part:
    return cls(**fields)
