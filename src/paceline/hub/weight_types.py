"""The types that a model's weights get, as transformers gives them, and weights that files have more precisely.

transformers keeps some weights in 32 bits whatever type is asked for: routers of experts, say. And a folder may have
tensors of several types. A model is loaded in the type of most of them, which rounds the others; where that would be
seen after they get their own type, the file's bytes are put in their place.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.published_names import published_names
from paceline.checkpoint.safetensors_file import TensorInfo
from paceline.hub.stored_weights import FLOATS, FileTensor, StoredWeights
from paceline.parallel.class_name import own_class
from paceline.parallel.part_dtype import set_precise

__all__ = ["convert_buffers", "final_types", "restore_precise", "widest"]


def final_types(model: Any, empty: Any, wanted: torch.dtype) -> dict[str, torch.dtype]:
    """The types that a model's stored floating tensors have where transformers loads them as `wanted`, by names.
    `empty`: the model without numbers, made in that type; modules may ask for another one."""
    ask: Any = getattr(model, "_get_dtype_plan", None)
    asked: Any = ask(wanted) if callable(ask) else {}
    kept = [(re.compile(pattern.replace("*", ".*")), dtype) for pattern, dtype in asked.items()]
    own = {name: one.dtype for name, one in empty.state_dict().items()}
    return {
        name: next((dtype for pattern, dtype in kept if pattern.search(name)), own.get(name, wanted))
        for name, one in _stored(model)
        if one.is_floating_point()
    }


def convert_buffers(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Give buffers their types: they are small, and whole on each worker."""
    for name, one in _stored(model):
        if name in types and not isinstance(one, nn.Parameter) and one.dtype != types[name]:
            _put(model, name, one.to(types[name]))


def restore_precise(
    model: Any, stored: StoredWeights, types: Mapping[str, torch.dtype] | None, left: set[str]
) -> list[str]:
    """Put the files' bytes in the place of what was rounded when it was loaded; returns the names in the files of what
    has become part of other tensors, and cannot be put back so.

    types: those that the weights get; a weight that has its type already was rounded once, as it has to be. None: all
    is to be as in the files. left: names in the files of what the model has no place for.
    """
    rounded = {
        name: one
        for name, one in stored.tensors.items()
        if (dtype := FLOATS.get(one.type)) is not None and name not in left and not _fits(dtype, stored.dtype)
    }
    if not rounded:
        return []
    here = dict(_stored(model))
    names = _Names(model, here)
    lost: list[str] = []
    for name, about in rounded.items():
        own = names.own(name, about)
        if own is None:
            lost.append(name)
            continue
        present = here[own]
        if _fits(FLOATS[about.type], present.dtype) or (types is not None and types.get(own) == present.dtype):
            continue
        precise = _read(stored, about, name)
        if isinstance(present, nn.Parameter):
            set_precise(present, precise)
        else:
            _put(model, own, precise)
    return lost


def widest(stored: StoredWeights) -> torch.dtype:
    """A type that has all numbers of all floating tensors of the files."""
    found = stored.dtype
    for one in stored.tensors.values():
        if one.type in FLOATS:
            found = torch.promote_types(found, FLOATS[one.type])
    return found


class _Names:
    """A model's own names for the tensors of files."""

    def __init__(self, model: Any, here: Mapping[str, Tensor]) -> None:
        self._model, self._here = model, here
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        self._made: dict[str, str] | None = None  # those that transformers gives other names, and does not join

    def own(self, name: str, about: FileTensor) -> str | None:
        for one in (name, f"{self._prefix}{name}", name.removeprefix(self._prefix)):
            if one in self._here and tuple(self._here[one].shape) == about.shape:
                return one
        return self._renamed().get(name)

    def _renamed(self) -> dict[str, str]:
        if self._made is None:
            tensors: dict[str, TensorInfo] = {name: (one.dtype, tuple(one.shape)) for name, one in self._here.items()}
            kind = own_class(self._model)
            found = published_names(
                f"{kind.__module__}:{kind.__qualname__}", self._model.config.to_json_string(), tensors, {}
            )
            self._made = {
                made: own[0]
                for own, tensors_made in found.groups
                for made, about in tensors_made.items()
                if len(own) == len(tensors_made) == 1 and about == tensors.get(own[0])
            }
        return self._made


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters and persistent buffers under all their names."""
    names = model.state_dict().keys()
    for found in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        yield from ((name, one) for name, one in found if name in names)


def _fits(inner: torch.dtype, outer: torch.dtype) -> bool:
    """Whether a type has all numbers of another one."""
    return torch.promote_types(inner, outer) == outer


def _read(stored: StoredWeights, about: FileTensor, name: str) -> Tensor:
    """A tensor of a file, mapped."""
    if stored.opened is not None:
        return stored.opened[about.file][name]
    open_file: Any = importlib.import_module("safetensors").safe_open
    with open_file(stored.folder / about.file, "pt") as file:
        return file.get_tensor(name)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, value)
