"""Sees what a forward and its loss change outside of parameters and buffers, and puts it back.

That is what plain attributes of modules hold, and, of functions that run a micro-batch, what their closures hold, the
globals that they use, and attributes of their objects: numbers, tensors, arrays, random generators, and containers and
objects of them. Buffers of modules that are not prepared count, too. Tensors are compared by identity and version, and
small ones on the CPU by their numbers.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import functools
import inspect
import pickle
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.parallel.class_name import class_name

__all__ = [
    "Holder",
    "Keeper",
    "Place",
    "Restore",
    "Scan",
    "changed_places",
    "functions_of_modules",
    "holders_of_functions",
    "holders_of_modules",
    "is_generator",
    "places_of",
]

OWN = frozenset(vars(nn.Module()))  # what torch gives to every module
DEPTH, ITEMS, BYTES = 4, 512, 1 << 20  # of containers within each other, of one of them, of an array
OBJECTS = 20_000  # that are looked into; of others only their identity counts
FUNCTIONS = 64  # that are followed from the one that runs a micro-batch
MACHINERY = ("torch.distributed.", "torch._dynamo.", "torch.utils.hooks.", "paceline.")  # whose objects layouts keep
# Objects of the standard library are locks, threads, files and loggers; those of these modules hold plain values.
PLAIN = frozenset({"builtins", "__main__", "array", "collections", "random", "types"})
SMALL = 1 << 16  # bytes of tensors on the CPU whose numbers are compared, too: `.data` changes them without a version
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

    def __contains__(self, name: object) -> bool:
        try:
            self.cells[name].cell_contents  # type: ignore[index]  # noqa: B018  # asks whether it has one
        except (KeyError, ValueError):
            return False
        return True


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
        elif not isinstance(one, CODE) and not is_machinery(one) and (fields := _fields_of(one)) is not None:
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


class Scan:
    """What holders held at one time."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        self.alive: list[Any] = []  # so that no id is used again
        self._known: dict[int, Hashable] = {}
        self.holders = list(holders)
        self.values = [dict(one.items()) for one in self.holders]
        self.seen = [{name: self._of(value, DEPTH) for name, value in some.items()} for some in self.values]

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors that were there; they stay alive, and so theirs, as long as this object does."""
        return {id(one) for one in self.alive if isinstance(one, Tensor)}

    def _of(self, value: Any, depth: int) -> Hashable:
        """Describe a value by what can be compared later; what is shared is described once."""
        if value is None or type(value) in (bool, int, str, bytes):
            return value
        if type(value) in (float, complex):
            return repr(value)  # a number that is none equals itself here
        if isinstance(value, CODE) or is_machinery(value):
            return ""
        if id(value) not in self._known:
            self.alive.append(value)
            self._known[id(value)] = id(value)  # of one that contains itself
            if len(self._known) < OBJECTS:
                with contextlib.suppress(Exception):  # objects may do anything where they are read
                    self._known[id(value)] = self._described(value, depth)
        return self._known[id(value)]

    def _described(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, Tensor):
            return id(value), -1 if value.is_inference() else value._version, _numbers_of(value)
        if isinstance(value, np.ndarray):
            is_small = value.nbytes <= BYTES and not value.dtype.hasobject
            return id(value), zlib.crc32(np.ascontiguousarray(value).tobytes()) if is_small else value.shape
        if is_generator(value):
            return id(value), zlib.crc32(_state_of(value))
        if isinstance(value, (bytearray, array.array)):
            return id(value), zlib.crc32(value)
        if depth == 0:
            return id(value)
        if isinstance(value, (list, tuple, collections.deque)):
            items: list[Any] = list(value)[:ITEMS]
            return type(value).__name__, len(value), tuple(self._of(one, depth - 1) for one in items)
        if isinstance(value, (set, frozenset)):
            plain = [one for one in list(value)[:ITEMS] if type(one) in (bool, int, float, str, bytes, type(None))]
            return type(value).__name__, len(value), frozenset(plain)
        fields = _fields_of(value)
        if fields is None:
            return id(value)
        pairs = list(fields.items())[:ITEMS]
        return id(value), len(fields), tuple((self._of(key, 1), self._of(one, depth - 1)) for key, one in pairs)


def places_of(holders: Iterable[Holder]) -> list[Place]:
    """All places that hold something."""
    return [
        Place(f"{one.label}{name}", one.fields, name, one.identity(name)) for one in holders for name, _ in one.items()
    ]


def changed_places(before: Scan, after: Scan) -> dict[Place, Any]:
    """Where something else is held now, or something has come or gone, and what was held before."""
    found: dict[Place, Any] = {}
    for holder, then, now, values in zip(before.holders, before.seen, after.seen, before.values, strict=True):
        if then != now:
            for name in dict.fromkeys([*then, *now]):
                if then.get(name, MISSING) != now.get(name, MISSING):
                    place = Place(f"{holder.label}{name}", holder.fields, name, holder.identity(name))
                    found[place] = values.get(name, MISSING)
    return found


def _numbers_of(value: Tensor) -> int:
    is_read = value.device.type == "cpu" and type(value) is Tensor and value.layout is torch.strided
    if not is_read or value.nbytes > SMALL:
        return 0
    return zlib.crc32(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _fields_of(value: Any) -> dict[Any, Any] | None:
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


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers that is not a global one."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator)


Restore = Callable[[], Any]  # puts back what an object held, and returns the object


class Keeper:
    """Keeps what values hold; what is shared is kept once."""

    def __init__(self, written: Collection[int] = (), *, copies: bool = True) -> None:
        """`written`: ids of large tensors that are written in place. `copies`: whether anything is."""
        self._written, self._copies = written, copies
        self._known: dict[int, Restore] = {}

    def again(self) -> Keeper:
        """Another one of the same kind, for what values hold at another time."""
        return Keeper(self._written, copies=self._copies)

    def keep(self, value: Any, depth: int = DEPTH) -> Restore:
        """Return what puts the value back as it is now."""
        if id(value) not in self._known:
            self._known[id(value)] = lambda: value  # of one that contains itself
            if len(self._known) < OBJECTS:
                with contextlib.suppress(Exception):  # objects may do anything where they are read
                    self._known[id(value)] = self._kept(value, depth)
        return self._known[id(value)]

    def _kept(self, value: Any, depth: int) -> Restore:
        if value is MISSING or isinstance(value, CODE) or is_machinery(value):
            return lambda: value
        if isinstance(value, Tensor):
            is_copied = self._copies and (id(value) in self._written or value.nbytes <= BYTES)
            return _keep_tensor(value) if is_copied and _is_writable(value) else lambda: value
        if isinstance(value, np.ndarray):
            return _keep_array(value) if self._copies else lambda: value
        if is_generator(value):
            return _keep_generator(value)
        if isinstance(value, (bytearray, array.array)):
            return _keep_bytes(value)
        if depth == 0:
            return lambda: value
        if isinstance(value, tuple):
            return _keep_tuple(value, [self.keep(one, depth - 1) for one in value[:ITEMS]])
        if isinstance(value, (list, collections.deque)):
            is_short = len(value) <= ITEMS
            return _keep_items(value, [self.keep(one, depth - 1) for one in value]) if is_short else lambda: value
        if isinstance(value, set):
            return _keep_set(value)
        fields = _fields_of(value)
        if fields is not None and len(fields) <= ITEMS:
            return _keep_fields(value, fields, {key: self.keep(one, depth - 1) for key, one in fields.items()})
        return lambda: value


def _keep_tensor(value: Tensor) -> Restore:
    copy, version, numbers = value.detach().clone(), value._version, _numbers_of(value)

    def restore() -> Tensor:
        if value._version != version or _numbers_of(value) != numbers:
            with torch.no_grad():
                value.copy_(copy)
        return value

    return restore


def _is_writable(value: Tensor) -> bool:
    is_spread = any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))
    return not (value.is_meta or value.is_inference() or is_spread)


def _keep_bytes(value: Any) -> Restore:
    copy = value[:]

    def restore() -> Any:
        value[:] = copy
        return value

    return restore


def _keep_array(value: np.ndarray[Any, Any]) -> Restore:
    copy = value.copy()

    def restore() -> Any:
        if value.flags.writeable:
            value[...] = copy
        return value

    return restore


def _keep_generator(value: Any) -> Restore:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, np.random.Generator):
        numbers = value.bit_generator.state

        def restore() -> Any:
            value.bit_generator.state = numbers
            return value

        return restore
    is_python = isinstance(value, random.Random)
    kept = value.getstate() if is_python else value.get_state()

    def restore_other() -> Any:
        _ = value.setstate(kept) if is_python else value.set_state(kept)
        return value

    return restore_other


def _keep_tuple(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        for item in items:
            item()  # a tuple holds the same objects for good
        return value

    return restore


def _keep_items(value: Any, items: list[Restore]) -> Restore:
    def restore() -> Any:
        found = [item() for item in items]
        if len(found) != len(value) or any(one is not other for one, other in zip(found, value, strict=True)):
            value.clear()
            value.extend(found)
        return value

    return restore


def _keep_set(value: set[Any]) -> Restore:
    copy = set(value)

    def restore() -> set[Any]:
        if value != copy:
            value.clear()
            value.update(copy)
        return value

    return restore


def _keep_fields(value: Any, fields: dict[Any, Any], items: Mapping[Any, Restore]) -> Restore:
    def restore() -> Any:
        for key in [key for key in fields if key not in items]:
            del fields[key]
        for key, item in items.items():
            found = item()
            if fields.get(key, MISSING) is not found:
                fields[key] = found
        return value

    return restore
