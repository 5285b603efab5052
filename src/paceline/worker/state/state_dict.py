"""What a run's state consists of, by name: how it becomes tensors and plain values, and how it comes back on any number
of workers.

Models, optimizers and other objects get names in the order in which they are prepared ("model", "model_2", "optimizer",
...). Optimizer state is stored per parameter under the parameter's own name, so it does not depend on the order of
parameters. Only worker 0 touches files; what it reads it sends to the others. What a worker at the same place of a
replica had fits as it is: see `paceline.worker.state.snapshot`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import Checkpoint
from paceline.comm.group import WorkerGroup
from paceline.comm.remote_tensors import is_remote, without_fetching
from paceline.comm.sharded_tensors import TensorSlice, fill_local, is_sharded, local_part, part_like, whole_shape
from paceline.errors import CheckpointError
from paceline.parallel.apply import send_from_first
from paceline.parallel.offload.optimizer_state import OffloadedState
from paceline.worker.state.tensor_source import InMemoryTensors, TensorSource
from paceline.worker.step.model_buffers import persistent_buffers
from paceline.worker.topology.parallel_groups import StateOwner

__all__ = [
    "StateRegistry",
    "load_model",
    "load_object",
    "load_optimizer",
    "merge_replica_states",
    "restore_learning_rates",
    "set_extra",
]

CPU = torch.device("cpu")
EXTRA = "_extra_state"  # what torch calls, in a module's state, that which its `get_extra_state` returns


class StateRegistry:
    """The prepared objects of one worker, by name."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device  # on which the models are
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.offloaded: dict[str, OffloadedState] = {}  # of optimizers whose state lies elsewhere
        self.objects: dict[str, Any] = {}  # schedulers and everything else with state_dict / load_state_dict
        self.homes: dict[str, StateOwner] = {}  # by full name, of models of which workers have different tensors
        self.stand_ins: dict[
            int, str
        ] = {}  # ids of tensors that optimizers hold in place of parameters, and the names of these
        self.cuts: dict[
            str, TensorSlice
        ] = {}  # by a parameter's full name: what this worker holds of it, where it is cut
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
        """Raise ValueError where, by their names, tensors of something new and of something known may be taken for each
        other's."""
        starts = {"model": f"{name}.", "optimizer": f"{name}.state."}
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
        """id of a parameter, or of what stands in for it, -> its full name, over all models; a tied one has its first
        name."""
        names = {**self.stand_ins}
        for prefix, model in self.models.items():
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), f"{prefix}.{name}")
        return names

    def held_names(self) -> dict[str, list[list[str]]]:
        """The full names of the parameters of each optimizer's groups."""
        names = self.parameter_names()
        return {
            name: [[_name_of(p, names, name) for p in group["params"]] for group in optimizer.param_groups]
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
            of_model = {f"{prefix}.{name}": value for name, value in _entries(model)[0].items()}
            found.update(
                (name, value) for name, value in of_model.items() if not value.is_meta and not is_remote(value)
            )
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items():
            for parameter, state in optimizer.state.items():
                for key, value in state.items() if not parameter.is_meta else ():  # some make state for all at once
                    if isinstance(value, Tensor):
                        found[f"{prefix}.state.{_name_of(parameter, parameters, prefix)}.{key}"] = value
        return found

    def tensor_homes(self) -> dict[str, StateOwner]:
        """Which workers of a replica have the word on which of its tensors; those of an optimizer go with their
        parameters."""
        found = dict(self.homes)
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items() if self.homes else ():
            for parameter, state in optimizer.state.items():
                name = _name_of(parameter, parameters, prefix)
                found.update((f"{prefix}.state.{name}.{key}", self.homes[name]) for key in state if name in self.homes)
        return found

    def tensor_cuts(self) -> dict[str, TensorSlice]:
        """What this worker holds of those of `tensors` that are smaller than the whole: parameters that are cut, and
        what optimizers keep in their shape. CheckpointError where an optimizer keeps anything else for them."""
        found = dict(self.cuts)
        parameters = self.parameter_names()
        for prefix, optimizer in self.optimizers.items() if self.cuts else ():
            for parameter, state in optimizer.state.items():
                name = _name_of(parameter, parameters, prefix)
                for key, value in state.items() if name in self.cuts else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        found[f"{prefix}.state.{name}.{key}"] = self.cuts[name]
                    elif isinstance(value, Tensor) and value.dim():
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
            "extra": {prefix: _entries(model)[1] for prefix, model in self.models.items()},
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


def load_model(
    name: str,
    model: nn.Module,
    plain: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    group: WorkerGroup,
    cuts: Mapping[str, TensorSlice],
    homes: Mapping[str, StateOwner],
    *,
    device: torch.device = CPU,
) -> None:
    """Fill a model from worker 0's checkpoint, and make it equal on all workers; all must call it.

    Of a model that is split, one whole tensor at a time is read and sent, and each worker keeps its part; of one of
    which workers have different tensors (`homes`), those that have this one. Persistent buffers that are None here, and
    had been filled there, are made on `device`. Raises CheckpointError where the checkpoint is of another model.
    """
    forms, old = group.broadcast_object(None if checkpoint is None else _checkpoint_contents(name, model, checkpoint))
    _make_buffers(model, forms, device)
    tensors, present = _entries(model)
    extra = {**{key.removeprefix(f"{name}."): value for key, value in old.items()}, **plain["extra"].get(name, {})}
    _require_extra(name, present, extra)
    wanted = {f"{name}.{key}": value for key, value in tensors.items()}
    split = {key: value for key, value in wanted.items() if is_sharded(value) or key in cuts or key in homes}
    if checkpoint is not None:
        shapes = {
            key: value.new_empty(whole_shape(value, cuts.get(key)), device="meta") for key, value in split.items()
        }
        checkpoint.tie(_tied_names(name, model, wanted))
        checkpoint.require({**wanted, **shapes, **old}, prefix=f"{name}.")
        checkpoint.load_into({key: value for key, value in wanted.items() if key not in split})
    set_extra(model, extra)
    for key, target in split.items():
        shape = whole_shape(target, cuts.get(key))
        complete = _broadcast_tensor(key, checkpoint, group, shape=shape, dtype=target.dtype)
        if not target.is_meta:
            fill_local(target, complete, cuts.get(key))
    if not homes.keys().isdisjoint(split):
        return  # what no checkpoint holds was made equal when the model was cut
    own = {id(parameter) for key, parameter in model.named_parameters() if f"{name}.{key}" in split}
    send_from_first([t for t in (*model.parameters(), *model.buffers()) if id(t) not in own], group)


_BufferForms = dict[str, tuple[torch.Size, torch.dtype]]


def _checkpoint_contents(name: str, model: nn.Module, checkpoint: Checkpoint) -> tuple[_BufferForms, dict[str, Tensor]]:
    """What all have to know of a checkpoint: shapes and types of the model's persistent buffers, by their names in it,
    and by full names the extra states that are stored as tensors, as early versions did."""
    there = set(checkpoint.names)
    buffers = {path: f"{name}.{path}" for path, _, _ in persistent_buffers(model)}
    forms = {path: (checkpoint.shape(key), checkpoint.dtype(key)) for path, key in buffers.items() if key in there}
    return forms, checkpoint.load(key for key in checkpoint.names if key.startswith(f"{name}.") and _is_extra(key))


def _make_buffers(model: nn.Module, forms: _BufferForms, device: torch.device) -> None:
    """Put zeros where a persistent buffer is None, and a checkpoint has one."""
    for path, module, key in persistent_buffers(model):
        if path in forms and getattr(module, key) is None:
            shape, dtype = forms[path]
            setattr(module, key, torch.zeros(shape, dtype=dtype, device=device))


def _require_extra(name: str, here: Collection[str], there: Collection[str]) -> None:
    """Raise CheckpointError where other modules of a model have extra states than in the checkpoint."""
    problems = [f"{name}.{key}: in the model, but not in the checkpoint" for key in here if key not in there]
    problems += [f"{name}.{key}: in the checkpoint, but not in the model" for key in there if key not in here]
    if problems:
        raise CheckpointError("the checkpoint does not fit:\n  " + "\n  ".join(problems))


def _tied_names(name: str, model: nn.Module, wanted: Container[str]) -> list[list[str]]:
    """The names of each tensor that a model has under several, of those that are wanted."""
    found: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for key, one in named(remove_duplicate=False):
            if f"{name}.{key}" in wanted:
                found.setdefault(id(one), []).append(f"{name}.{key}")
    return [names for names in found.values() if len(names) > 1]


def _broadcast_tensor(
    key: str, checkpoint: TensorSource | None, group: WorkerGroup, *, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """A whole tensor on the CPU: what worker 0 reads, on all workers."""
    complete = torch.empty(shape, dtype=dtype) if checkpoint is None else checkpoint.load([key])[key].contiguous()
    group.broadcast(complete, what=f"{key} from worker 0")
    return complete


def load_optimizer(
    name: str,
    optimizer: Optimizer,
    registry: StateRegistry,
    plain: Mapping[str, Any],
    checkpoint: TensorSource | None,
    group: WorkerGroup,
) -> None:
    """Fill an optimizer on all workers: tensors from worker 0's checkpoint, options from the plain state."""
    saved = plain["optimizers"].get(name)
    if saved is None:
        raise CheckpointError(
            f"the checkpoint has no state for {name!r}; it has {', '.join(plain['optimizers']) or 'none'}"
        )
    names = registry.parameter_names()
    present = [[_name_of(p, names, name) for p in options["params"]] for options in optimizer.param_groups]
    if present != [options["params"] for options in saved["groups"]]:
        raise CheckpointError(
            f"{name}: its parameter groups differ from the checkpoint's: {[len(g) for g in present]} parameters now, "
            f"{[len(options['params']) for options in saved['groups']]} then, or others. Give it the same ones, "
            "or start with another run_dir"
        )
    lacking = {key for options in optimizer.param_groups for key in options} - {
        key for o in saved["groups"] for key in o
    }
    if lacking:
        raise CheckpointError(
            f"{name} is a {type(optimizer).__name__} now, and the checkpoint's was of another kind: it has no "
            f"{', '.join(sorted(lacking))}. Use the same optimizer as before, or start with another run_dir"
        )
    order = {parameter: number for number, parameter in enumerate(itertools.chain(*present))}
    state: dict[int, dict[str, Any]] = {order[key]: dict(values) for key, values in saved["values"].items()}
    held = [p for options in optimizer.param_groups for p in options["params"]]
    split = {names[id(p)]: p for p in held if is_sharded(p) or names[id(p)] in registry.cuts}
    absent = {names[id(p)] for p in held if p.is_meta}
    is_parted = any(names[id(p)] in registry.homes for p in held)
    state = {key: values for key, values in state.items() if not held[key].is_meta}
    offloaded, by_name = registry.offloaded.get(name), {names[id(p)]: p for p in held}
    one_by_one = offloaded is not None or is_parted
    for key, tensor in _optimizer_tensors(name, checkpoint, group, split, registry.cuts, one_by_one=one_by_one):
        parameter, entry = _key_parts(name, key)
        if parameter in absent:
            continue
        if offloaded is not None and tensor.dim():
            offloaded.take(by_name[parameter], entry, tensor)
        else:
            state.setdefault(order[parameter], {})[entry] = tensor
    groups = []
    first = 0
    for options in saved["groups"]:
        groups.append({**options, "params": list(range(first, first + len(options["params"])))})
        first += len(options["params"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _optimizer_tensors(
    name: str,
    checkpoint: TensorSource | None,
    group: WorkerGroup,
    split: Mapping[str, Tensor],
    cuts: Mapping[str, TensorSlice],
    *,
    one_by_one: bool,
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors on the CPU, read by worker 0 and sent to the others; of `split` parameters, by their full
    names, only what is here. `one_by_one`: never all of them at a time."""
    is_here = isinstance(checkpoint, InMemoryTensors)  # whose tensors are local parts already
    if one_by_one or (split and not is_here):
        told: list[tuple[str, torch.Size, torch.dtype]] | None = None
        if checkpoint is not None:
            keys = [key for key in checkpoint.names if key.startswith(f"{name}.state.")]
            told = [(key, checkpoint.shape(key), checkpoint.dtype(key)) for key in keys]
        for key, shape, dtype in group.broadcast_object(told):
            complete = _broadcast_tensor(key, checkpoint, group, shape=shape, dtype=dtype)
            owner = _key_parts(name, key)[0]
            if owner in split and complete.dim() and not is_here:
                complete = part_like(complete, split[owner], cuts.get(owner))
            yield key, complete
        return
    loaded: dict[str, Tensor] = {}
    if checkpoint is not None:
        loaded = checkpoint.load([key for key in checkpoint.names if key.startswith(f"{name}.state.")])
    described = group.broadcast_object({key: (tuple(value.shape), value.dtype) for key, value in loaded.items()})
    arrived = loaded or {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in described.items()}
    send_from_first([arrived[key] for key in described], group)
    yield from arrived.items()


def _key_parts(name: str, key: str) -> tuple[str, str]:
    """Full name of the parameter, and the entry of its state, of a tensor of the optimizer `name`."""
    parameter, _, entry = key.removeprefix(f"{name}.state.").rpartition(".")
    return parameter, entry


def load_object(name: str, thing: Any, plain: Mapping[str, Any]) -> None:
    """Fill a scheduler or another object from the plain state, which all workers hold."""
    if name not in plain["objects"]:
        raise CheckpointError(
            f"the checkpoint has no state for {name!r}; it has {', '.join(plain['objects']) or 'none'}"
        )
    thing.load_state_dict(plain["objects"][name])


def restore_learning_rates(optimizers: Mapping[str, Optimizer], saved_by_name: Mapping[str, Any]) -> None:
    """Put the saved options of parameter groups back: constructing a scheduler sets learning rates anew."""
    for name, optimizer in optimizers.items():
        saved = saved_by_name.get(name)
        for group, options in zip(optimizer.param_groups, saved["groups"] if saved else [], strict=False):
            group.update({key: value for key, value in options.items() if key != "params"})


def _entries(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model's state: parameters and persistent buffers, live, and what modules keep by `get_extra_state`, be it a
    tensor or not; tensors of the latter on the CPU."""
    with without_fetching():
        state = model.state_dict()
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and not _is_extra(key)}
    return tensors, {key: _on_cpu(value) for key, value in state.items() if key not in tensors}


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) and not value.is_meta else value


def set_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give back what modules keep by `get_extra_state`; a tensor as a copy, on the device of the present one."""
    for key, value in extra.items():
        module = model.get_submodule(key.rpartition(".")[0])
        module.set_extra_state(_copy_for(module, value) if isinstance(value, Tensor) else value)


def _copy_for(module: nn.Module, extra: Tensor) -> Tensor:
    present = module.get_extra_state()
    return extra.to(present.device if isinstance(present, Tensor) else extra.device, copy=True)


def _plain_optimizer(name: str, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    groups = [
        {**group, "params": [_name_of(p, names, name) for p in group["params"]]} for group in optimizer.param_groups
    ]
    values = {
        _name_of(parameter, names, name): {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }
    return {"groups": groups, "values": {key: value for key, value in values.items() if value}}


def _name_of(parameter: Tensor, names: Mapping[int, str], optimizer: str) -> str:
    """The parameter's full name; ValueError where it is of no prepared model (`add_param_group` checks nothing)."""
    if id(parameter) not in names:
        raise ValueError(
            f"{optimizer} holds a parameter of shape {list(parameter.shape)} that is of no prepared model, so it is "
            "neither averaged nor saved: prepare the model that has it before optim.add_param_group()"
        )
    return names[id(parameter)]
