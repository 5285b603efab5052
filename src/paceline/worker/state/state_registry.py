"""What a run's prepared objects consist of, by name: how their state becomes tensors and plain values.

Models, optimizers and other objects get names in the order in which they are prepared ("model", "model_2", "optimizer",
...). Optimizer state is stored per parameter under the parameter's own name, so it does not depend on the order of
parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.remote_tensors import is_remote, without_fetching
from paceline.comm.sharded_tensors import TensorSlice, local_part
from paceline.errors import CheckpointError
from paceline.parallel.offload.optimizer_state import OffloadedState
from paceline.parallel.partial_state import reading_parts
from paceline.worker.topology.parallel_groups import StateOwner

__all__ = [
    "CPU",
    "StateRegistry",
    "WholeState",
    "is_extra_state",
    "merge_owned_values",
    "merge_replica_states",
    "model_entries",
    "parameter_name",
    "tied_names",
]

CPU = torch.device("cpu")
EXTRA = "_extra_state"  # what torch calls, in a module's state, that which its `get_extra_state` returns


@dataclasses.dataclass(frozen=True, slots=True)
class WholeState:
    """Where an optimizer's state of a parameter is, which is split although the state is whole."""

    is_here: bool
    is_stored_here: bool  # this worker writes it: the first of those that have it


class StateRegistry:
    """The prepared objects of one worker, by name."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device  # on which the models are
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.offloaded: dict[str, OffloadedState] = {}  # of optimizers whose state lies elsewhere
        self.objects: dict[str, Any] = {}  # schedulers and everything else with state_dict / load_state_dict
        # By full name, of models of which workers have different tensors: the worker that stores each.
        self.owners: dict[str, StateOwner] = {}
        # By a parameter's full name: what this worker holds of it, where it is split.
        self.slices: dict[str, TensorSlice] = {}
        # By an optimizer's and a parameter's name ("optimizer.state.model.weight"): the state is whole, on one worker.
        self.whole_states: dict[str, WholeState] = {}
        # ids of tensors that optimizers hold in place of parameters, and the names of these.
        self.stand_ins: dict[int, str] = {}
        self.tables: set[str] = set()  # full names of parameters of which servers have the rows, once they are there

    def name_for(self, kind: str, wanted: str | None) -> str:
        """A new name of a kind ("model", "optimizer", "scheduler", "object")."""
        taken = {**self.models, **self.optimizers, **self.objects}
        if wanted is not None:
            if wanted in taken:
                raise ValueError(f"prepare(name={wanted!r}): that name is taken; names must differ")
            self._refuse_alike(kind, wanted)
            return wanted
        number = 1
        while (name := kind if number == 1 else f"{kind}_{number}") in taken:
            number += 1
        self._refuse_alike(kind, name)
        return name

    def _refuse_alike(self, kind: str, name: str) -> None:
        """Raise ValueError where the tensors of something new and of something known could have the same names."""
        starts = {"model": f"{name}.", "optimizer": f"{name}.state.", "average": f"{name}.state."}
        known = {one: f"{one}." for one in self.models} | {one: f"{one}.state." for one in self.optimizers}
        for other, start in known.items() if kind in starts else ():
            if start.startswith(starts[kind]) or starts[kind].startswith(start):
                raise ValueError(
                    f"a new {kind} cannot be named {name!r} beside {other!r}: checkpoints name its tensors "
                    f"{starts[kind]}..., and those of {other!r} {start}..., so a start could not tell whose they are. "
                    "Choose names of which none begins with another one and a dot: prepare(..., name=...)"
                )

    def refuse_known_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError for an optimizer that has a name already."""
        for name, known in self.optimizers.items():
            if known is optimizer:
                raise ValueError(
                    f"this {type(optimizer).__name__} is prepared already, as {name!r}; prepare each optimizer once"
                )

    def parameter_names(self) -> dict[int, str]:
        """Return the full names of parameters, over all models, by their ids or those of their stand-ins. A tied one
        has its first name."""
        names = {**self.stand_ins}
        for prefix, model in self.models.items():
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), f"{prefix}.{name}")
        return names

    def held_names(self) -> dict[str, list[list[str]]]:
        """The full names of the parameters of each optimizer's groups."""
        names = self.parameter_names()
        return {
            name: [[parameter_name(p, names, name) for p in group["params"]] for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by their full names, over all models."""
        return {
            f"{prefix}.{key}": one for prefix, model in self.models.items() for key, one in model.named_parameters()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state that is here: parameters, persistent buffers, optimizer state."""
        found: dict[str, Tensor] = {}
        for prefix, model in self.models.items():
            of_model = {f"{prefix}.{name}": value for name, value in model_entries(model)[0].items()}
            found.update(
                (name, value) for name, value in of_model.items() if not value.is_meta and not is_remote(value)
            )
        found.update(self.optimizer_tensors())
        return found

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The tensors of all optimizers' state that are here."""
        found: dict[str, Tensor] = {}
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if not parameter.is_meta else ():  # some make state for all at once
                    if isinstance(value, Tensor):
                        found[f"{prefix}.state.{parameter_name(parameter, parameters, prefix)}.{key}"] = value
        return found

    def tensor_owners(self) -> dict[str, StateOwner]:
        """Which worker of a replica stores each of its tensors; those of an optimizer go with their parameters."""
        found = dict(self.owners)
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items() if self.owners or self.whole_states else ():
            for parameter, state in optimizer.state.items():
                name = parameter_name(parameter, parameters, prefix)
                if (whole := self.whole_states.get(f"{prefix}.state.{name}")) is not None:
                    owner = StateOwner(is_here=whole.is_stored_here)
                    found.update((f"{prefix}.state.{name}.{key}", owner) for key in state)
                    continue
                found.update(
                    (f"{prefix}.state.{name}.{key}", self.owners[name]) for key in state if name in self.owners
                )
        return found

    def tensor_slices(self) -> dict[str, TensorSlice]:
        """What this worker holds of those of `tensors` that are smaller than the whole: parameters that are split,
        and what optimizers keep in their shape. CheckpointError where an optimizer keeps anything else for them."""
        found = dict(self.slices)
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items() if self.slices else ():
            for parameter, state in optimizer.state.items():
                name = parameter_name(parameter, parameters, prefix)
                is_part = name in self.slices and f"{prefix}.state.{name}" not in self.whole_states
                for key, value in state.items() if is_part else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        found[f"{prefix}.state.{name}.{key}"] = self.slices[name]
                    elif isinstance(value, Tensor) and value.numel() > 1:
                        raise CheckpointError(
                            f"cannot store {key} of {name}: {prefix} keeps it in the shape {list(value.shape)}, and "
                            f"each worker has a part of the parameter, {list(parameter.shape)}. Use an optimizer whose "
                            "state has its parameters' shapes (Adam, SGD), or Layout(tensor=1)"
                        )
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the state that are on this worker; tied ones count once."""
        here = {local.data_ptr(): local.nbytes for local in map(local_part, self.tensors().values())}
        return sum(here.values())

    def plain(self) -> dict[str, Any]:
        """Everything else: parameter groups, plain optimizer state, the other objects' state."""
        parameters = self.parameter_names()
        return {
            "optimizers": {
                name: _plain_optimizer(name, optimizer, parameters) for name, optimizer in self.optimizers.items()
            },
            "objects": {name: thing.state_dict() for name, thing in self.objects.items()},
            "extra": {prefix: model_entries(model)[1] for prefix, model in self.models.items()},
        }


def merge_replica_states(parts: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> dict[str, Any]:
    """Return the plain state of a replica whose workers have different tensors: the first one's, and of each parameter
    and module that of the part at its place."""
    state = {**parts[0], "optimizers": {}, "extra": {}}
    for name, first in parts[0]["optimizers"].items():
        values = {
            key: value
            for index, part in enumerate(parts)
            for key, value in part["optimizers"][name]["values"].items()
            if places.get(key, 0) == index
        }
        state["optimizers"][name] = {**first, "values": values}
    for name, first in parts[0]["extra"].items():
        state["extra"][name] = {key: parts[places.get(f"{name}.{key}", 0)]["extra"][name][key] for key in first}
    return state


def merge_owned_values(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plain state of workers of which each has that of the parameters that it steps: all values together."""
    optimizers = dict(parts[0]["optimizers"])
    for part in parts[1:]:
        for name, one in part["optimizers"].items():
            optimizers[name] = {**optimizers[name], "values": {**one["values"], **optimizers[name]["values"]}}
    return {**parts[0], "optimizers": optimizers}


def model_entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model's state: parameters and persistent buffers, live, and what modules keep by `get_extra_state`, be it a
    tensor or not; tensors of the latter on the CPU."""
    with without_fetching(), reading_parts():
        state = model.state_dict()
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and not is_extra_state(key)}
    return tensors, {key: _on_cpu(value) for key, value in state.items() if key not in tensors}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer with the first name of the same tensor."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found[name] = first.setdefault(id(tensor), name)
    return found


def is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) and not value.is_meta else value


def _plain_optimizer(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    groups = [
        {**group, "params": [parameter_name(p, names, name) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    values = {
        parameter_name(parameter, names, name): {
            key: value for key, value in state.items() if not isinstance(value, Tensor)
        }
        for parameter, state in optimizer.state.items()
    }
    return {"groups": groups, "values": {key: value for key, value in values.items() if value}}


def parameter_name(parameter: Tensor, names: Mapping[int, str], optimizer: str) -> str:
    """The parameter's full name; ValueError where it is of no prepared model (`add_param_group` checks nothing)."""
    if id(parameter) not in names:
        raise ValueError(
            f"{optimizer} holds a parameter of shape {list(parameter.shape)} that is of no prepared model, so it is "
            "neither averaged nor saved: prepare the model that has it before optim.add_param_group()"
        )
    return names[id(parameter)]
