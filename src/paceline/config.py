"""Reads configuration into frozen dataclasses, from TOML and short text; and writes them as text or plain data.

The dataclasses are the only description of what can be set. Everything here follows their annotations, which may be
made of bool, int, float, str, None, Literal, tuple[T, ...], dataclasses, and unions of these. A union of dataclasses
is chosen by class name:

    wire = {kind = "Cast", dtype = "bf16"}      TOML
    wire = "cast(dtype=bf16)"                   short form: TOML, --set, and inside a plan's line of text

A dataclass may have a static method `refusal(name, value) -> str | None`: why a word that belongs to the vocabulary
is not accepted. All mistakes are PlanErrors that name the dotted path, the value, what is legal, and the nearest
legal name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar
from urllib.parse import quote, unquote

from paceline.errors import PlanError

__all__ = [
    "KIND",
    "annotations_of",
    "check_fields",
    "choices",
    "convert_value",
    "describe",
    "load_toml",
    "non_defaults",
    "parse_value",
    "read",
    "read_short",
    "require_all",
    "suggest",
    "to_python",
    "to_short",
    "to_table",
    "to_word",
    "unknown_name",
]

T = TypeVar("T")

KIND = "kind"  # the key that names the class where an annotation allows several
UNION = typing.get_origin(Literal[0] | None)  # what a union with a Literal is; all others are types.UnionType
TUPLE = {False: re.compile(","), True: re.compile("[-,]")}  # of anything; of whole numbers: "2-8" in a plan's text
MOST_BYTES = 1 << 20  # of a job file
SHORT_FORM = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<fields>.*)\))?\s*")
COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^()]*\))")  # in the fields of a short form: another may be within


def load_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; PlanError where it cannot be read or is not TOML."""
    import tomllib

    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise PlanError(
                f"{path} has more than {MOST_BYTES >> 20} MiB; a job file has a few lines. Name another one."
            )
        return tomllib.loads(text.decode())
    except OSError as error:
        raise PlanError(f"Cannot read {path}: {error.strerror}.") from error
    except RecursionError:
        raise PlanError(f"{path} is not a job file: its values are nested too deeply.") from None
    except ValueError as error:  # no TOML, no UTF-8, or a number of more digits than Python reads
        raise PlanError(f"{path} is not valid TOML: {error}.") from error


def read(cls: type[T], table: Mapping[str, Any], *, path: str = "") -> T:
    """Make a `cls` from a table of typed values; `path` is what messages put before the field names."""
    annotations = annotations_of(cls)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in annotations:
            raise unknown_name(cls, name, value, path=path)
        values[name] = convert_value(value, annotations[name], path=_join(path, name), owner=cls, name=name)
    require_all(cls, values, path=path)
    return cls(**values)


def convert_value(value: Any, annotation: Any, *, path: str, owner: type, name: str) -> Any:
    """Return a value as the annotation wants it: a dataclass for a table or short form, a tuple for an array."""
    kinds = choices(annotation)
    if kinds and isinstance(value, str):
        return read_short(value, annotation, path=path)
    if kinds and isinstance(value, Mapping):
        table = dict(value)
        kind = table.pop(KIND, next(iter(kinds)) if len(kinds) == 1 else None)
        if kind is None:
            raise PlanError(f"{path} does not say which kind it is: add {KIND} = {' or '.join(map(repr, kinds))}.")
        if not isinstance(kind, str):
            raise PlanError(f"{path}.{KIND} is {kind!r}; it must be {' or '.join(map(repr, kinds))}.")
        return read(_chosen(kind, annotation, path=f"{path}.{KIND}", value=kind), table, path=path)
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, PurePath) and str in _alternatives(annotation):
        value = str(value)
    if not _fits(value, annotation):
        raise _misfit(value, annotation, path=path, owner=owner, name=name)
    return float(value) if isinstance(value, int) and _wants_float(annotation) else value


def parse_value(text: str, annotation: Any, *, path: str, owner: type | None = None, name: str = "") -> Any:
    """Return the value that `text` means under an annotation: "8", "1e-3", "true", "none", "bf16", "cast(dtype=bf16)".

    `owner` and `name` say which field it is for, so that its class can refuse the value by name; `path` is for
    messages.
    """
    text = text.strip()
    options = _alternatives(annotation)
    word = text.lower()
    if type(None) in options and word in ("none", "null"):
        return None
    if bool in options and word in ("true", "false"):
        return word == "true"
    for option in options:
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if typing.get_origin(option) is typing.Literal:
            for legal in typing.get_args(option):
                if text == str(legal):
                    return legal
        if typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            parts = TUPLE[item is int].split(text) if text else []
            if len(options) > 1 and len(parts) < 2:
                continue  # another alternative's
            return tuple(parse_value(part, item, path=path) for part in parts)
    if choices(annotation):
        return read_short(text, annotation, path=path)
    if str in options:
        return text
    raise _misfit(text, annotation, path=path, owner=owner, name=name)


def read_short(text: str, annotation: Any, *, path: str) -> Any:
    """Make one of the annotation's dataclasses from its short form: "raw", "batch(size=64,micro=8)"."""
    match = SHORT_FORM.fullmatch(text)
    if match is None:
        raise PlanError(f"{path} is {text!r}; it must be {describe(annotation)}, written as name(field=value,...).")
    cls = _chosen(match["name"], annotation, path=path, value=text)
    annotations = annotations_of(cls)
    values: dict[str, Any] = {}
    for part in _fields_of_short(match):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            raise PlanError(f"{path}: {part!r} in {text!r} has no name; write {cls.__name__.lower()}(field=value,...).")
        if name in values:
            raise PlanError(f"{path}: {name} is given twice in {text!r}.")
        if name not in annotations:
            raise unknown_name(cls, name, value, path=path)
        values[name] = parse_value(unquote(value), annotations[name], path=_join(path, name), owner=cls, name=name)
    require_all(cls, values, path=path)
    return cls(**values)


def names_in_short(text: str) -> tuple[str, ...]:
    """Return the names of the fields that a short form gives, in its order; none where it is no short form."""
    match = SHORT_FORM.fullmatch(text.strip())
    return () if match is None else tuple(part.partition("=")[0].strip() for part in _fields_of_short(match))


def _fields_of_short(match: re.Match[str]) -> Iterator[str]:
    """The parts field=value of a short form."""
    return filter(None, map(str.strip, COMMA_OUTSIDE_BRACKETS.split(match["fields"] or "")))


def check_fields(obj: Any) -> None:
    """Raise PlanError where a field's value does not fit its annotation; made for `__post_init__`."""
    cls = type(obj)
    for name, annotation in annotations_of(cls).items():
        value = getattr(obj, name)
        if not _fits(value, annotation):
            raise _misfit(value, annotation, path=f"{cls.__name__}.{name}", owner=cls, name=name)


def require_all(cls: type, values: Mapping[str, Any], *, path: str) -> None:
    """Raise PlanError where `values` lacks a field of `cls` that has no default."""
    for field in dataclasses.fields(cls):
        if field.name not in values and _default(field) is dataclasses.MISSING:
            legal = describe(annotations_of(cls)[field.name])
            raise PlanError(
                f"{_join(path, field.name)} is missing: {cls.__name__} needs {field.name}, which must be {legal}."
            )


def unknown_name(cls: type, name: str, value: object, *, path: str) -> PlanError:
    """Return the error for a field that `cls` does not have: refused by name, or with the nearest legal names."""
    refused = _refusal(cls, name, value)
    if refused:
        return PlanError(refused)
    annotations = annotations_of(cls)
    nested = _nested_names(cls, path)
    meant = [dotted for dotted in nested if dotted.rpartition(".")[2] == name]  # the field's own name before like ones
    near = suggest(name, meant or annotations) or suggest(name, nested)
    return PlanError(
        f"{_join(path, name)}: {cls.__name__} has no field {name!r}.{near} "
        f"It has {', '.join(annotations) or 'no fields'}."
    )


def suggest(name: str, legal: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest legal name, or ""; of a dotted name the last part counts."""
    import difflib

    spelled = {word.rpartition(".")[2].lower(): word for word in legal}
    near = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return f" Did you mean {spelled[near[0]]!r}?" if near else ""


def non_defaults(obj: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, in order."""
    return {
        field.name: value for field in dataclasses.fields(obj) if (value := getattr(obj, field.name)) != _default(field)
    }


def to_short(obj: Any) -> str:
    """Return the short form of a dataclass, defaults left out: "cast(dtype=bf16)"; `read_short` reads it back."""
    fields = ",".join(f"{name}={to_word(value)}" for name, value in non_defaults(obj).items())
    name = type(obj).__name__.lower()
    return f"{name}({fields})" if fields else name


def to_word(value: object) -> str:
    """Return a field's value as it stands in a short form: letters, digits and ".-_" only, safe in a file name.

    Any other character of a text is written as in a URL, "%2F" for "/".
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if dataclasses.is_dataclass(value):
        return to_short(value)
    return repr(value).replace("+", "") if isinstance(value, float) else quote(str(value), safe="")


def to_table(obj: Any) -> dict[str, Any]:
    """Return a dataclass as plain data for JSON, all fields of it; `read` makes the same one again."""
    table: dict[str, Any] = {}
    for name, annotation in annotations_of(type(obj)).items():
        value = getattr(obj, name)
        if dataclasses.is_dataclass(value):
            kind = {KIND: type(value).__name__} if len(choices(annotation)) > 1 else {}
            value = kind | to_table(value)
        table[name] = value
    return table


def to_python(obj: Any) -> str:
    """Return Python that makes `obj` again, defaults left out: "Cast(dtype='bf16')"."""
    return f"{type(obj).__name__}({', '.join(f'{name}={value!r}' for name, value in non_defaults(obj).items())})"


@functools.cache
def annotations_of(cls: type) -> dict[str, Any]:
    """Return field name -> resolved annotation of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def choices(annotation: Any) -> dict[str, type[Any]]:
    """Return class name -> class of the dataclasses that an annotation allows."""
    options = [option for option in _alternatives(annotation) if isinstance(option, type)]
    return {option.__name__: option for option in options if dataclasses.is_dataclass(option)}


def describe(annotation: Any) -> str:
    """Return what an annotation allows, in words: "a whole number or none", "'bf16' or 'fp16'"."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    said: list[str] = []
    for option in _alternatives(annotation):
        if typing.get_origin(option) is typing.Literal:
            said += [repr(legal) for legal in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            said.append(f"a tuple (in TOML an array) of {describe(typing.get_args(option)[0])}")
        else:
            said.append(words.get(option) or option.__name__)
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} or {said[-1]}"


def _chosen(name: str, annotation: Any, *, path: str, value: object) -> type:
    kinds = choices(annotation)
    for legal, cls in kinds.items():
        if _folded(legal) == _folded(name):
            return cls
    for cls in kinds.values():
        if refused := _refusal(cls, name, value):
            raise PlanError(refused)
    raise PlanError(f"{path} is {value!r}; it must be {describe(annotation)}.{suggest(name, kinds)}")


def _misfit(value: object, annotation: Any, *, path: str, owner: type | None, name: str) -> PlanError:
    refused = _refusal(owner, name, value) if owner else None
    if refused:
        return PlanError(refused)
    near = ""
    if isinstance(value, str):
        words = [legal for option in _alternatives(annotation) for legal in typing.get_args(option)]
        near = suggest(value, [legal for legal in words if isinstance(legal, str)])
    if isinstance(value, type) and value in choices(annotation).values():
        near = f" Did you mean {value.__name__}(...)?"
    shown = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}..."
    return PlanError(f"{path} is {shown}; it must be {describe(annotation)}.{near}")


def _refusal(cls: type, name: str, value: object) -> str | None:
    ask = getattr(cls, "refusal", None)
    return ask(name, value) if ask else None


def _fits(value: object, annotation: Any) -> bool:
    return any(_fits_one(value, option) for option in _alternatives(annotation))


def _fits_one(value: object, option: Any) -> bool:
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return any(type(value) is type(legal) and value == legal for legal in typing.get_args(option))
    if origin is tuple:
        item = typing.get_args(option)[0]
        return isinstance(value, tuple) and all(_fits(part, item) for part in value)
    if option is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is UNION:
        return typing.get_args(annotation)
    return (annotation,)


def _wants_float(annotation: Any) -> bool:
    options = _alternatives(annotation)
    return float in options and int not in options


def _nested_names(cls: type, path: str) -> list[str]:
    """Dotted names of the fields one level below those of `cls`."""
    nested = [(field, kind) for field, option in annotations_of(cls).items() for kind in choices(option).values()]
    return [f"{_join(path, field)}.{name}" for field, kind in nested for name in annotations_of(kind)]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _folded(name: str) -> str:
    return name.replace("_", "").lower()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
