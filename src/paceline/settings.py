"""Changes of single values in nested dataclasses, such as `--set plan.batch.size=64`: read once, then passed as data.

    settings = settings_of(Plan(), ["plan.batch.size=64", "plan.wire.dtype=fp16"])
    plan = with_settings(script_plan, settings)

A value is read by the annotation of its field, without the object that it will change: a plan may be in a script, which
only workers run. Whether that object has the field, and whether all values fit together, shows when they are set.
Mistakes are PlanErrors, as in `paceline.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from paceline import config
from paceline.errors import PlanError

__all__ = ["Setting", "apply", "setting_from_table", "setting_to_table", "settings_of", "with_settings"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One value, and the names of the fields that lead to it from the outermost dataclass."""

    names: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        """As an override says it, without the name of the outermost dataclass: "batch.size=64"."""
        return f"{'.'.join(self.names)}={self.value if isinstance(self.value, str) else config.to_word(self.value)}"


def apply(obj: T, *overrides: str) -> T:
    """Return `obj` with overrides such as "plan.batch.size=64" applied, in order; the leading "plan." may be left out.

    Fields of one dataclass change together, so that the order of overrides that need each other does not matter.
    """
    return with_settings(obj, settings_of(obj, overrides))


def settings_of(obj: Any, overrides: Iterable[str]) -> tuple[Setting, ...]:
    """Read overrides. `obj` is what they change, or the default where that is not known yet.

    A field that `obj` does not have is read as that of another class which may stand in the same place.
    """
    root = type(obj).__name__.lower()
    parts: dict[str, Any] = {}  # that overrides before have replaced as a whole
    found: list[Setting] = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals:
            raise PlanError(f"{override!r} sets nothing: write it as name=value, for example {root}.name=value.")
        names = dotted.strip().split(".")
        if len(names) > 1 and names[0] == root:
            names = names[1:]
        value = _read_value(text.strip(), names, type(obj), {**_fields_of(obj), **parts}, path=root)
        found.append(Setting(tuple(names), value))
        if len(names) == 1:
            parts[names[0]] = value
    return tuple(found)


def with_settings(obj: T, settings: Sequence[Setting]) -> T:
    """Return `obj` with all settings made; it is checked once, when all of its fields have their new values."""
    return _changed(obj, [(setting.names, setting.value) for setting in settings], path=type(obj).__name__.lower())


def setting_to_table(setting: Setting) -> dict[str, Any]:
    """Return plain data for JSON, which `setting_from_table` reads back."""
    value = setting.value
    if dataclasses.is_dataclass(value):
        value = {config.KIND: type(value).__name__, **config.to_table(value)}
    return {"names": list(setting.names), "value": value}


def setting_from_table(cls: type, table: Mapping[str, Any]) -> Setting:
    """Read the setting of a field of `cls`, or of what is in it."""
    *outer, name = names = tuple(table["names"])
    owner = cls
    for inner, field in zip(outer, names[1:], strict=True):
        owner = _kind_with(field, config.annotations_of(owner)[inner]) or owner
    path = ".".join((cls.__name__.lower(), *names))
    annotation = config.annotations_of(owner)[name]
    return Setting(names, config.convert_value(table["value"], annotation, path=path, owner=owner, name=name))


def _read_value(text: str, names: Sequence[str], cls: type, values: Mapping[str, Any], *, path: str) -> Any:
    """Read the value of the field that `names` lead to, from an object of class `cls` with these values."""
    name, *rest = names
    if name not in config.annotations_of(cls):
        raise config.unknown_name(cls, name, text, path=path)
    annotation, here = config.annotations_of(cls)[name], f"{path}.{name}"
    if not rest:
        return config.parse_value(text, annotation, path=here, owner=cls, name=name)
    current = values.get(name)
    kind = type(current) if _has_field(type(current), rest[0]) else _kind_with(rest[0], annotation)
    if kind is None:
        _require_fields(current, path=here)
        kind = type(current)
    return _read_value(text, rest, kind, _fields_of(current) if isinstance(current, kind) else {}, path=here)


def _changed(obj: T, settings: Sequence[tuple[Sequence[str], Any]], *, path: str) -> T:
    annotations = config.annotations_of(type(obj))
    values: dict[str, Any] = {}
    inner: dict[str, list[tuple[Sequence[str], Any]]] = {}  # of fields' own fields; those to be made yet
    for (name, *rest), value in settings:
        here = f"{path}.{name}"
        if name not in annotations:
            raise config.unknown_name(type(obj), name, value, path=path)
        current = values.get(name, getattr(obj, name))
        if rest:
            _require_field(current, rest[0], value, annotations[name], path=here)
            inner.setdefault(name, []).append((rest, value))
            continue
        if name in inner:  # the new value takes its place, but what makes no sense is not dropped silently
            _changed(current, inner.pop(name), path=here)
        values[name] = value
    for name, own in inner.items():
        values[name] = _changed(values.get(name, getattr(obj, name)), own, path=f"{path}.{name}")
    return dataclasses.replace(obj, **values) if values else obj  # type: ignore[type-var]  # a dataclass, as every caller of it says


def _require_fields(value: Any, *, path: str) -> None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise PlanError(f"{path} is {value!r}, which has no fields: write {path}=value.")


def _require_field(current: Any, name: str, value: Any, annotation: Any, *, path: str) -> None:
    """Raise PlanError where `current`, at `path`, has no fields, or only another kind of it has a field `name`."""
    _require_fields(current, path=path)
    other = _kind_with(name, annotation)
    if other is not None and not _has_field(type(current), name):
        raise PlanError(
            f"{path} is {type(current).__name__}, which has no field {name!r}; {other.__name__} has: "
            f"use {path}={other.__name__.lower()}({name}={config.to_word(value)})."
        )


def _kind_with(field: str, annotation: Any) -> type | None:
    """Return the first class that an annotation allows and that has a field of this name."""
    return next((kind for kind in config.choices(annotation).values() if _has_field(kind, field)), None)


def _has_field(cls: type, name: str) -> bool:
    return dataclasses.is_dataclass(cls) and name in config.annotations_of(cls)


def _fields_of(obj: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return {}
    return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
