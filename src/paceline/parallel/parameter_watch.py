"""Sees changes of parameters that their version counters miss: through `.data`, and new parameters in a module's place.

`p.data` is another tensor with a count of its own, and `p.data = x` counts nothing. So `data` of torch's parameters is
a property of ours. While a gradient pass runs it keeps what it hands out, whose own versions then tell whether it was
written to. Outside of passes it does what torch's does, and an ordinary step pays nothing.

torch calls a hook for each parameter and module that is registered. So no step looks at all modules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["Registration", "changes", "data_of", "note_data_set", "registered_at"]

_OF_TENSORS: dict[str, Any] = dict(vars(torch.Tensor.__mro__[1]))  # what torch's C++ gives to tensors
TORCH_DATA = _OF_TENSORS["data"]


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """A parameter or module was registered; `before`: what had the name, if anything."""

    module: nn.Module
    name: str
    before: Any
    now: Any


class ParameterChanges:
    """What happened to parameters of this process since `open`."""

    def __init__(self) -> None:
        self.is_open = False
        self.num_registered = 0  # in all: grows where a list of all parameters may be out of date
        self.registered: list[Registration] = []
        self._data: list[tuple[Any, Any]] = []  # what `.data` handed out; None: it was set
        self._is_installed = False

    def install(self) -> None:
        """Have torch tell of `.data` and of registrations, from now on."""
        if self._is_installed:
            return
        self._is_installed = True
        setattr(nn.Parameter, "data", property(data_of, _set_data))  # noqa: B010  # the stub has it as a plain attribute
        register_module_parameter_registration_hook(self._note)
        register_module_module_registration_hook(self._note)

    def open(self) -> None:
        self._data, self.registered, self.is_open = [], [], True

    def close(self) -> None:
        self._data, self.registered, self.is_open = [], [], False

    def written(self) -> set[int]:
        """Return the ids of the parameters that were written through `.data`, or whose data was set."""
        return {id(one) for one, found in self._data if found is None or found._version}

    def keep(self, parameter: Any, found: Any) -> None:
        self._data.append((parameter, found))

    def _note(self, module: nn.Module, name: str, now: Any) -> None:
        self.num_registered += 1
        if self.is_open:
            self.registered.append(Registration(module, name, registered_at(module, name), now))


changes = ParameterChanges()


def registered_at(module: nn.Module, name: str) -> Any:
    """Return the parameter or module that has this name in a module; None where there is none."""
    found = vars(module)["_parameters"].get(name)
    return vars(module)["_modules"].get(name) if found is None else found


def data_of(parameter: Any) -> Any:
    """Return `.data` of a parameter, as torch does."""
    found = TORCH_DATA.__get__(parameter)
    if changes.is_open:
        changes.keep(parameter, found)
    return found


def note_data_set(parameter: Any) -> None:
    """Called where `.data` of a parameter is set."""
    if changes.is_open:
        changes.keep(parameter, None)


def _set_data(parameter: Any, value: Any) -> None:
    TORCH_DATA.__set__(parameter, value)
    note_data_set(parameter)
