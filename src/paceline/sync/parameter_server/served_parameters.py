"""The parameters that a parameter server holds, with the user's optimizers reduced to them, and their state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.sync.parameter_server.embedding_rows import EmbeddingRows, is_by_rows

__all__ = [
    "ParameterGroups",
    "ServerParameters",
    "check_parameter_groups",
    "options_of",
    "parameter_groups_of",
    "set_options",
    "write_option",
]

ParameterGroups = tuple[tuple[tuple[int, ...], ...], ...]  # of each optimizer's groups, the ids of the parameters


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group as plain JSON values: everything that a scheduler may change."""
    return [{key: _plain(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def parameter_groups_of(optimizers: Sequence[Optimizer]) -> ParameterGroups:
    """Return which parameters are in which groups."""
    return tuple(tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups) for optimizer in optimizers)


def check_parameter_groups(optimizers: Sequence[Optimizer], held: ParameterGroups) -> None:
    """Raise RuntimeError if the groups are not those that the servers began with."""
    now = parameter_groups_of(optimizers)
    changed = [one for one, was, has in zip(optimizers, held, now, strict=True) if was != has]
    if changed:
        raise RuntimeError(
            f"the parameter groups of {type(changed[0]).__name__} have changed since the first step "
            "(add_param_group?), but under ParameterServer the servers go on with those of the first step. Add all "
            "groups before it, with requires_grad_(False) where parameters are to stay as they are, or use "
            "sync=AllReduce()"
        )


class ServerParameters:
    """Some parameters, by their places in the model, and the optimizers reduced to them.

    The objects belong to this process and are changed in place. Parameters `elsewhere` are emptied. Of embedding
    tables, the server keeps the `rows` given by the tables' places.
    """

    def __init__(
        self,
        parameters: Mapping[int, Parameter],
        optimizers: Sequence[Optimizer],
        *,
        elsewhere: Iterable[Parameter] = (),
        rows: Mapping[int, slice] | None = None,
    ) -> None:
        self.version = 0  # updates since the beginning
        self._parameters = dict(parameters)
        self._places = {id(parameter): place for place, parameter in self._parameters.items()}
        tables = {place: self._parameters[place] for place in rows or {}}
        self.rows = EmbeddingRows(tables, rows or {}, optimizers)
        for parameter in (one for place, one in self._parameters.items() if place not in tables):
            parameter.data = parameter.data.clone()  # it may be in memory that other processes share
            parameter.grad = None
        for parameter in elsewhere:
            parameter.grad = None
            if not parameter.is_shared():  # otherwise emptying it frees nothing
                parameter.data = parameter.data.new_empty(0)
        self._optimizers = [_PartialOptimizer(optimizer, self._places) for optimizer in optimizers]

    def step(self, gradients: Mapping[int, Tensor], options: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Make the optimizers step, with these options of all their groups; parameters without gradients stay."""
        for place, gradient in gradients.items():
            self._parameters[place].grad = gradient
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            optimizer.step(groups)
        for place in gradients:
            self._parameters[place].grad = None
        self.version += 1

    @torch.no_grad()
    def weights(self, places: Sequence[int]) -> list[Tensor]:
        """Return copies of parameters, one flat tensor for each dtype, in the order of `places`."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for place in places:
            parameter = self._parameters[place]
            by_dtype.setdefault(parameter.dtype, []).append(parameter.detach().reshape(-1))
        return [torch.cat(some) for some in by_dtype.values()]

    def state(self, *, with_rows: bool = False) -> tuple[dict[str, list[Any]], list[Tensor]]:
        """Return the optimizers' state as a header, and its tensors in the same order, as copies.

        "entries" are those of their state: [optimizer, place, key, whether it is a tensor, plain value]. State by rows
        of tables is included only with `with_rows`. "written" is what the optimizers have written into their groups
        themselves: [optimizer, group, key, and so on]. "options" are the workers' newest options of the groups here.
        """
        entries: list[list[Any]] = []
        written: list[list[Any]] = []
        tensors: list[Tensor] = []
        for number, optimizer in enumerate(self._optimizers):
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    if not with_rows and is_by_rows(value) and self._places[id(parameter)] in self.rows:
                        continue
                    entries.append([number, self._places[id(parameter)], key, *_entered(value, tensors)])
        for number, optimizer in enumerate(self._optimizers):
            written += [[number, group, key, *_entered(value, tensors)] for group, key, value in optimizer.written()]
        return {"entries": entries, "written": written, "options": [one.options for one in self._optimizers]}, tensors

    @torch.no_grad()
    def fill(self, flats: Iterable[Tensor], kept: Mapping[str, Sequence[Any]], tensors: Iterator[Tensor]) -> None:
        """Take over the results of another server's `weights` of all `places` and `state(with_rows=True)`."""
        by_dtype = {flat.dtype: flat for flat in flats}
        for parameter in self._parameters.values():
            flat = by_dtype[parameter.dtype]
            parameter.copy_(flat[: parameter.numel()].view(parameter.shape))
            by_dtype[parameter.dtype] = flat[parameter.numel() :]
        for optimizer, options in zip(self._optimizers, kept["options"], strict=True):
            optimizer.state.clear()
            optimizer.begin_with(options)
        for number, place, key, is_tensor, value in kept["entries"]:
            state = self._optimizers[number].state.setdefault(self._parameters[place], {})
            state[key] = next(tensors).clone() if is_tensor else _read(value)
        for number, group, key, is_tensor, value in kept["written"]:
            write_option(self._optimizers[number].groups[group], key, next(tensors).clone() if is_tensor else value)

    @property
    def places(self) -> list[int]:
        """The places of all parameters that it holds."""
        return [*self._parameters]

    def like(self, place: int, flat: Tensor) -> Tensor:
        """Return a part of a flat tensor as the gradient of a parameter."""
        parameter = self._parameters[place]
        return flat.to(parameter.dtype).view(parameter.shape)

    def numel(self, place: int) -> int:
        return self._parameters[place].numel()


class _PartialOptimizer:
    """An optimizer without the parameters that are elsewhere; groups without any parameter here are left out.

    An option of a group is set only when workers send another value than before. So what the optimizer itself writes
    there stays: some optimizers count their steps that way.
    """

    def __init__(self, optimizer: Optimizer, places: Mapping[int, int]) -> None:
        self._optimizer = optimizer
        self.groups: dict[int, dict[str, Any]] = {}  # those that are kept, by their numbers
        groups, optimizer.param_groups[:] = [*optimizer.param_groups], []
        for number, group in enumerate(groups):
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in places]
            if group["params"]:
                self.groups[number] = group
                optimizer.param_groups.append(group)
        for parameter in [one for one in optimizer.state if id(one) not in places]:
            del optimizer.state[parameter]
        self.options = options_of(optimizer)  # the newest options of these groups that workers have sent

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        return self._optimizer.state

    def step(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Step with these options of all groups, if any group is here."""
        for (number, group), before in zip(self.groups.items(), self.options, strict=True):
            said = options[number]
            set_options(group, {key: said[key] for key in said if key not in before or before[key] != said[key]})
            before.update(said)
        if self.groups:
            self._optimizer.step()

    def begin_with(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Begin with the options that workers have sent to another server for the groups that are kept."""
        self.options = [dict(some) for some in options]
        for group, some in zip(self.groups.values(), self.options, strict=True):
            set_options(group, some)

    def written(self) -> Iterator[tuple[int, str, Any]]:
        """Yield what the optimizer has written into its groups: number of the group, key and value."""
        for (number, group), said in zip(self.groups.items(), self.options, strict=True):
            for key, value in group.items():
                if key != "params" and (key not in said or said[key] != _plain(value)):
                    yield number, key, value


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set a group's options from JSON, where tuples and tensors are lists or numbers."""
    for key, value in options.items():
        held = group.get(key)
        if isinstance(held, Tensor):
            held.copy_(torch.as_tensor(_read(value), dtype=held.dtype))
        else:
            write_option(group, key, value)


def write_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Overwrite a value in a group, as a tuple if it was one: JSON has only lists."""
    value = _read(value)
    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _plain(value: Any) -> Any:
    """Return an option as a plain JSON value, which has no infinity: `{"number": "inf"}` (a limit that is off)."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    return {"number": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """Return what `_plain` has made plain."""
    if isinstance(value, list):
        return [_read(one) for one in value]
    return float(value["number"]) if isinstance(value, dict) and value.keys() == {"number"} else value


def _entered(value: Any, tensors: list[Tensor]) -> tuple[bool, Any]:
    """Return a value's entry in a header: whether it is a tensor, of which a copy is added to `tensors`, and the plain
    value otherwise."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().clone())
        return True, None
    return False, _plain(value)
