"""Finds out whose state an optimizer of whole parameters has kept: its files number parameters, and name none.

In fp32 numbers are those of an optimizer of torch, group by group. Parameters of a group are in the model's order, and
what is kept for each has its shape: where one assignment alone fits, it is the right one. In half precision DeepSpeed
keeps fp32 copies of the weights beside the state. The weights in the file are these copies, rounded: so they are
recognized by their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.compat.deepspeed_files.checkpoint_parts import is_plain, named_groups

__all__ = ["OptimizerByName", "read_whole_optimizer"]

MANY = 200_000  # assignments that are followed at a time, before it is given up

# fp32 copies of weights, state and groups, by the names of parameters.
OptimizerByName = tuple[dict[str, Tensor], dict[str, dict[str, Any]], list[dict[str, Any]]]


def read_whole_optimizer(state: Any, parameters: Mapping[str, Tensor]) -> OptimizerByName:
    """Give an optimizer's state to parameters, which are in the model's order, and as they are in the file. All is
    empty where it cannot be told whose it is."""
    if not isinstance(state, dict):
        return {}, {}, []
    parameters = _untied(parameters)
    inner = state.get("optimizer_state_dict")
    if isinstance(inner, dict) and "fp32_groups" in state:
        return _of_copies(inner, state["fp32_groups"], parameters)
    if isinstance(inner, dict) and "fp32_groups_flat" in state:
        return _of_flat_copies(inner, state["fp32_groups_flat"], parameters)
    groups, kept = _parts(state)
    numbers = [list(group.get("params", ())) for group in groups]
    shapes = [[_shape(kept.get(number, {})) for number in group] for group in numbers]
    found = _assigned(shapes, {name: one.shape for name, one in parameters.items()})
    return {}, *_named(groups, kept, numbers, found)


def _parts(state: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """The groups, and what is kept by numbers, of an optimizer of torch."""
    kept, groups = state.get("state"), state.get("param_groups")
    if not isinstance(kept, dict) or not isinstance(groups, list):
        return [], {}
    return cast("list[dict[str, Any]]", groups), {int(number): dict(of) for number, of in kept.items()}


def _named(
    groups: Sequence[Mapping[str, Any]],
    kept: Mapping[int, dict[str, Any]],
    numbers: Sequence[Sequence[int]],
    names: Sequence[Sequence[str]],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    pairs = [pair for group, own in zip(numbers, names, strict=False) for pair in zip(group, own, strict=True)]
    optimizer = {name: kept[number] for number, name in pairs if number in kept}
    named = [{**group, "params": list(own)} for group, own in zip(groups, names, strict=False)]
    return optimizer, named


def _untied(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without further names of a parameter: torch.save keeps what shares memory."""
    places: set[tuple[int, torch.Size]] = set()
    found: dict[str, Tensor] = {}
    for name, one in parameters.items():
        place = one.data_ptr(), one.shape
        if place not in places or not one.numel():
            found[name] = one
        places.add(place)
    return found


def _shape(kept: Mapping[str, Any]) -> torch.Size | None:
    return next((one.shape for one in kept.values() if isinstance(one, Tensor) and one.dim()), None)


def _assigned(groups: Sequence[Sequence[torch.Size | None]], names: Mapping[str, torch.Size]) -> list[list[str]]:
    """The names of each group's parameters, which are in the model's order; names that are left over are frozen. Empty
    where no assignment fits, or several.

    Goes through the names, and follows all assignments at once: each is known by how far it is in each group.
    """
    ends = tuple(len(group) for group in groups)
    skips = len(names) - sum(ends)
    begin = tuple(0 for _ in groups)
    steps: list[dict[tuple[int, ...], tuple[int, int | None]]] = []  # by place: number of ways, the last one's group
    places: dict[tuple[int, ...], tuple[int, int | None]] = {begin: (1, None)}
    for count, shape in enumerate(names.values()):
        following: dict[tuple[int, ...], tuple[int, int | None]] = {}

        def reach(place: tuple[int, ...], ways: int, group: int | None, into: dict[Any, Any] = following) -> None:
            into[place] = into.get(place, (0, None))[0] + ways, group

        for place, (ways, _) in places.items():
            if count - sum(place) < skips:
                reach(place, ways, None)
            for number, (at, group) in enumerate(zip(place, groups, strict=True)):
                if at < len(group) and group[at] in (None, shape):
                    reach((*place[:number], at + 1, *place[number + 1 :]), ways, number)
        steps.append(following)
        places = following
        if len(places) > MANY:
            return []
    if places.get(ends, (0, None))[0] != 1:
        return []
    found: list[list[str]] = [[] for _ in groups]
    place = ends
    for name, step in zip(reversed(list(names)), reversed(steps), strict=True):
        number = step[place][1]
        if number is not None:
            found[number].insert(0, name)
            place = (*place[:number], place[number] - 1, *place[number + 1 :])
    return found


# In half precision.


def _of_copies(inner: Mapping[str, Any], copies: Any, parameters: Mapping[str, Tensor]) -> OptimizerByName:
    """Each parameter has its own copy, in groups."""
    groups, kept = _parts(inner)
    left, masters = dict(parameters), dict[str, Tensor]()
    names: list[list[str]] = []
    for group in copies if isinstance(copies, (list, tuple)) else ():
        names.append([])
        for master in group:
            name = next((one for one, value in left.items() if _is_rounded(master, value)), None)
            if name is None:
                return {}, {}, []
            del left[name]
            masters[name] = master.detach()
            names[-1].append(name)
    numbers = [list(group.get("params", ())) for group in groups]
    if [len(group) for group in numbers] != [len(group) for group in names]:
        return masters, {}, []
    return masters, *_named(groups, kept, numbers, names)


def _of_flat_copies(inner: Mapping[str, Any], copies: Any, parameters: Mapping[str, Tensor]) -> OptimizerByName:
    """The copies of a group, and what is kept for it, are flat vectors, one parameter after the other."""
    groups, kept = _parts(inner)
    left, masters, optimizer = dict(parameters), dict[str, Tensor](), dict[str, dict[str, Any]]()
    shapes: list[dict[str, torch.Size]] = []
    for number, vector in enumerate(copies if isinstance(copies, (list, tuple)) else ()):
        shapes.append({})
        at = 0
        for name, value in list(left.items()):
            part = vector[at : at + value.numel()]
            if value.numel() and part.numel() == value.numel() and _is_rounded(part.view(value.shape), value):
                shapes[-1][name] = value.shape
                masters[name] = part.detach().view(value.shape)
                at += value.numel()
                del left[name]
        if at != vector.numel():
            return {}, {}, []
        for key, value in kept.get(number, {}).items():
            is_flat = isinstance(value, Tensor) and value.shape == vector.shape
            parts = value.split([math.prod(one) for one in shapes[-1].values()]) if is_flat else ()
            for place, (name, shape) in enumerate(shapes[-1].items()):
                if is_flat:
                    optimizer.setdefault(name, {})[key] = parts[place].reshape(shape).clone()
                elif is_plain(value):
                    optimizer.setdefault(name, {})[key] = value
    return masters, optimizer, named_groups(groups, shapes)


def _is_rounded(master: Tensor, value: Tensor) -> bool:
    """Whether a weight is a copy, rounded to the weight's type."""
    return master.shape == value.shape and torch.equal(master.detach().to(value.dtype), value)
