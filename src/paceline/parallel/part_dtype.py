"""Weights whose parts get another type than that of their files, part by part: no worker has the whole model in both.

A parameter is marked while it is still the bytes of its file. What a worker keeps of it is converted when it is known:
rows, a cut, the stages or experts of this worker. What the file was is remembered until weights are compared between
workers, a checkpoint fills them, or the model is prepared: equal bytes that were converted alike are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.absent_tensors import come
from paceline.parallel.file_weights import ORIGIN, FileMappings, WeightFiles

__all__ = [
    "convert_parts",
    "convert_rows",
    "forget",
    "in_one_type",
    "later_dtype",
    "later_dtypes",
    "mark",
    "set_precise",
]

MARK = "paceline_later_dtype"  # an attribute of parameters: the type that they get, and the one that they have
COMMON = "paceline_common_dtype"  # of parameters that files have more precisely than others: the type of the others


def mark(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Mark the parameters of these names that have another type."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in dtypes and parameter.dtype != dtypes[name]:
            setattr(parameter, MARK, (dtypes[name], parameter.dtype))


def later_dtype(parameter: Tensor) -> torch.dtype:
    """The type that a parameter will have. One that was given another type since (model.float()) keeps that."""
    wanted, present = getattr(parameter, MARK, (parameter.dtype, parameter.dtype))
    return wanted if present == parameter.dtype else parameter.dtype


def later_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The types that marked parameters will have, by name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: later_dtype(one) for name, one in named if later_dtype(one) != one.dtype}


def set_precise(parameter: nn.Parameter, precise: Tensor) -> None:
    """Give a parameter the more precise numbers of its file, in another type than the model has meanwhile."""
    setattr(parameter, COMMON, parameter.dtype)
    parameter.data = precise


@contextlib.contextmanager
def in_one_type(model: nn.Module) -> Iterator[None]:
    """While a model runs that is not converted yet: what it has more precisely is rounded to the type of the rest."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]  # a mode may watch who looks at weights
        types = {one.dtype for one in model.parameters() if not hasattr(one, COMMON)}  # model.float() leaves one
        precise = [
            (one, one.data) for one in model.parameters() if getattr(one, COMMON, one.dtype) in types - {one.dtype}
        ]
        for parameter, value in precise:
            parameter.data = value.to(getattr(parameter, COMMON))
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            for parameter, value in precise:
                parameter.data = value


def forget(model: nn.Module) -> None:
    """Take the marks off."""
    for parameter in model.parameters():
        for name in (MARK, COMMON):
            if hasattr(parameter, name):
                delattr(parameter, name)


@torch.no_grad()
def convert_parts(model: nn.Module) -> None:
    """Convert what is marked, one parameter at a time; memory of files that was read is given back.

    Other workers' parts (on the meta device) get the type, too: stages expect inputs as others compute them.
    """
    waiting = [one for one in model.parameters() if later_dtype(one) != one.dtype]
    come(waiting)
    mappings = FileMappings()
    for parameter in WeightFiles(waiting).in_order(waiting):
        place = mappings.place_of(parameter)
        parameter.data = parameter.data.to(later_dtype(parameter))
        if place is not None:
            setattr(parameter, ORIGIN, place)
    forget(model)


@torch.no_grad()
def convert_rows(unit: Any, dtypes: Iterable[tuple[nn.Module, str, torch.dtype]]) -> None:
    """Convert the rows that a unit of `fully_shard` keeps of parameters, each given by its module and name there."""
    done: dict[int, nn.Parameter] = {}
    for module, name, dtype in dtypes:
        rows: Any = getattr(module, name)
        if id(rows) not in done:
            done[id(rows)] = nn.Parameter(rows.detach().to(dtype), requires_grad=rows.requires_grad)
        setattr(module, name, done[id(rows)])
        del rows
    if done:
        unit._apply(_same, recurse=False)  # torch then takes over the parameters that modules have now


def _same(tensor: Tensor) -> Tensor:
    return tensor
