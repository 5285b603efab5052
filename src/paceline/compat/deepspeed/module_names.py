"""Answers `import deepspeed.NAME`: a program that imports this package as `deepspeed` gets its modules from here, too.

No torch here: a module is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from paceline.compat.deepspeed.refusals import SUBMODULES, is_refused, refusal
from paceline.errors import PlanError

__all__ = ["PACKAGE", "answer_imports", "stop_answering"]

PACKAGE = "paceline.compat.deepspeed"
NAME = "deepspeed"


class _Loader(importlib.abc.Loader):
    """Gives a module of this package under another name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._module = importlib.import_module(self._target)
        self._spec = self._module.__spec__
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # it has run already, under its own name


class _RefusedName:
    """A name of a module that is not here: a program may import it, and is refused where it uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise PlanError(f"{refusal(self._name)}.")

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PlanError(f"{refusal(f'{self._name}.{name}')}.")


class _RefusedModule(ModuleType):
    """A module that is not here. Programs import some at their top, and use them only for some of their options."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _RefusedName(f"{self.__name__.removeprefix(f'{NAME}.')}.{name}")


class _RefusedLoader(importlib.abc.Loader):
    """Makes a refused module."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _RefusedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `deepspeed`, and those that are refused where they are used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, name = fullname.partition(".")
        if top != NAME or not name:
            return None
        if name not in SUBMODULES and is_refused(name):
            return importlib.machinery.ModuleSpec(fullname, _RefusedLoader(), is_package=True)
        if name not in SUBMODULES:
            raise ModuleNotFoundError(refusal(name), name=fullname)
        is_package = any(one.startswith(f"{name}.") for one in SUBMODULES)
        return importlib.machinery.ModuleSpec(fullname, _Loader(f"{PACKAGE}.{SUBMODULES[name]}"), is_package=is_package)


_finder = _Finder()


def answer_imports() -> None:
    """From now on `deepspeed`, and `deepspeed.NAME`, are of this package. Raises ImportError where DeepSpeed itself is
    imported already."""
    present = sys.modules.get(NAME)
    ours = sys.modules[PACKAGE]
    if present is not None and present is not ours:
        raise ImportError(
            f"DeepSpeed itself ({getattr(present, '__file__', NAME)}) is imported already, and {PACKAGE} stands for "
            f"it: import {PACKAGE} first, or leave out `import deepspeed`"
        )
    sys.modules[NAME] = ours
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def stop_answering() -> None:
    """Put back what `answer_imports` has changed."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [one for one in sys.modules if one == NAME or one.startswith(f"{NAME}.")]:
        if getattr(sys.modules[name], "__name__", "").startswith(PACKAGE):
            del sys.modules[name]
