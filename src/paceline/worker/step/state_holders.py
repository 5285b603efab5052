"""Finds what may hold state outside of parameters and buffers of prepared models: modules, classes, functions, objects.

That is what plain attributes of modules and their classes hold, and, of functions that run a micro-batch, what their
closures hold, the globals that they use, and attributes of their objects. Buffers of modules that are not prepared
count, too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from paceline.parallel.class_name import class_name

__all__ = [
    "CODE",
    "MISSING",
    "Holder",
    "Place",
    "fields_of",
    "functions_of_modules",
    "holders_of_functions",
    "holders_of_modules",
    "is_machinery",
    "places_of",
]

OWN = frozenset(vars(nn.Module()))  # what torch gives to every module
FUNCTIONS = 64  # that are followed from the one that runs a micro-batch
MACHINERY = ("torch.distributed.", "torch._dynamo.", "torch.utils.hooks.", "paceline.")  # whose objects layouts keep
# Objects of the standard library are locks, threads, files and loggers; those of these modules hold plain values.
PLAIN = frozenset({"builtins", "__main__", "array", "collections", "random", "types"})
LIBRARIES = ("torch", "numpy", "paceline", "transformers", "timm", "diffusers", "peft")  # whose functions keep no state
CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, weakref.ref, nn.Module, nn.Parameter)
MISSING = object()  # there is nothing of this name


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Something that holds values by names. `names`: only these; None: all but what torch gives to every module."""

    label: str
    fields: MutableMapping[str, Any]
    names: tuple[str, ...] | None = None
    owner: Any = None  # what has the fields, where they are put together for each look

    def items(self) -> Iterator[tuple[str, Any]]:
        if self.names is None:
            return ((name, value) for name, value in list(self.fields.items()) if name not in OWN)
        return ((name, self.fields[name]) for name in self.names if name in self.fields)

    def identity(self, name: str) -> int:
        """The same for the same place, however often it is looked for."""
        if isinstance(self.fields, Cells):
            return id(self.fields.cells[name])
        return id(self.fields if self.owner is None else self.owner)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A name of a holder; equal for the same name of the same holder."""

    label: str = dataclasses.field(compare=False)
    fields: MutableMapping[str, Any] = dataclasses.field(compare=False, repr=False)
    name: str
    number: int  # the identity of what holds it

    def get(self) -> Any:
        return self.fields.get(self.name, MISSING)

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self.fields[self.name] = value
        elif self.name in self.fields:
            del self.fields[self.name]


class ClassAttributes(MutableMapping[str, Any]):
    """What a class holds for all its objects."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getitem__(self, name: str) -> Any:
        return vars(self.kind)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.kind, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in vars(self.kind) if not name.startswith("__"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Cells(MutableMapping[str, Any]):
    """The variables that a function has from the functions around it."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # not yet given a value
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def holders_of_modules(modules: Mapping[nn.Module, str]) -> list[Holder]:
    """The plain attributes of prepared modules, which have these names, and those of their classes."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    return [
        *(Holder(f"{name or class_name(module)}: self.", vars(module)) for module, name in modules.items()),
        *(
            Holder(f"{one.__name__}: {one.__name__}.", ClassAttributes(one), owner=one)
            for one in kinds
            if _package(one) not in (*LIBRARIES, "builtins", "typing")
        ),
    ]


def functions_of_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """The functions that run when prepared modules are called: forwards and their hooks."""
    found = dict.fromkeys(map(_forward_of, dict.fromkeys(map(type, modules))))
    hooks = [
        hook
        for module in modules
        for kind in ("_forward_pre_hooks", "_forward_hooks")
        for hook in vars(module).get(kind, {}).values()
        if _package(getattr(hook, "func", hook)) not in LIBRARIES
    ]
    return [*found, *hooks]


def holders_of_functions(functions: Iterable[Any], prepared: Mapping[nn.Module, str]) -> list[Holder]:
    """What functions that run a micro-batch use, other than `prepared` modules; they are followed through functions of
    the script."""
    found: list[Holder] = []
    seen, waiting = {id(module) for module in prepared}, [*functions][::-1]
    most = len(seen) + FUNCTIONS
    while waiting and len(seen) < most:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            given = {**{f"argument {number}": value for number, value in enumerate(one.args, 1)}, **one.keywords}
            found.append(Holder(f"{getattr(one.func, '__name__', 'partial')}: ", given, owner=one))
            waiting += [one.func, *(value for value in given.values() if _is_followed(value))]
        elif isinstance(one, MethodType):
            waiting += [one.__func__, one.__self__]
        elif isinstance(one, FunctionType):
            here = _holders_of_code(one)
            found += here if _package(one) != "paceline" else []
            waiting += [value for holder in here for _, value in holder.items() if _is_followed(value)]
        elif isinstance(one, nn.Module):
            for name, module in one.named_modules():
                if id(module) not in seen or module is one:
                    seen.add(id(module))
                    most += 1
                    label = f"{class_name(one)}{'.' if name else ''}{name}: self."
                    buffers = vars(module).get("_buffers")
                    found += [Holder(label, one) for one in (vars(module), buffers) if isinstance(one, dict)]
                    waiting.append(_forward_of(type(module)))
        elif not isinstance(one, CODE) and not is_machinery(one) and (fields := fields_of(one)) is not None:
            found.append(Holder(f"{type(one).__name__}: self.", fields))
            waiting += [vars(type(one)).get("__call__"), *(value for value in fields.values() if _is_followed(value))]
    return found


def _forward_of(kind: type) -> Any:
    return inspect.getattr_static(kind, "forward", None)  # scripted modules have none that can be asked for


def _is_followed(value: Any) -> bool:
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return True
    return isinstance(value, nn.Module) or (callable(value) and not isinstance(value, type))


def _holders_of_code(function: FunctionType) -> list[Holder]:
    name = function.__qualname__.rpartition("<locals>.")[2]
    found = [Holder(f"{name}: ", Cells(function), function.__code__.co_freevars)] if function.__closure__ else []
    if _package(function) not in LIBRARIES:
        found.append(Holder(f"{name}: ", function.__globals__, tuple(sorted(_names_in(function.__code__)))))
    return found


def _package(one: Any) -> str:
    return str(getattr(one, "__module__", "")).partition(".")[0]


def _names_in(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*(_names_in(one) for one in inner))


def places_of(holders: Iterable[Holder]) -> list[Place]:
    """All places that hold something."""
    return [
        Place(f"{one.label}{name}", one.fields, name, one.identity(name)) for one in holders for name, _ in one.items()
    ]


def fields_of(value: Any) -> dict[Any, Any] | None:
    """What a dict or an object holds by names; None: it is neither, or reading it is not known to be safe."""
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        return value
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return fields if isinstance(fields, dict) else None


def is_machinery(value: Any) -> bool:
    """Whether it belongs to what trains a model, and not to the model."""
    name = str(type(value).__module__)
    is_standard = name.partition(".")[0] in sys.stdlib_module_names
    return f"{name}.".startswith(MACHINERY) or (is_standard and name not in PLAIN)
