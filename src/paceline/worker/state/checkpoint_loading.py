"""How prepared objects get their state back from a checkpoint, on any number of workers.

Only worker 0 reads files; what it reads it sends to the others. What a worker at the same place of a replica had fits
as it is: see `local_tensors`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import Checkpoint
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import TensorSlice, fill_local, is_sharded, part_like, whole_shape
from paceline.errors import CheckpointError
from paceline.parallel.apply import send_from_first
from paceline.parallel.file_weights import forget_origins, without_same_files
from paceline.worker.state.state_registry import CPU, StateRegistry, is_extra_state, model_entries, parameter_name
from paceline.worker.state.tensor_source import InMemoryTensors, TensorSource
from paceline.worker.step.model_buffers import persistent_buffers
from paceline.worker.topology.parallel_groups import StateOwner

__all__ = ["load_model", "load_object", "load_optimizer", "restore_learning_rates", "set_extra"]


def load_model(
    name: str,
    model: nn.Module,
    plain: Mapping[str, Any],
    checkpoint: Checkpoint | None,
    group: WorkerGroup,
    slices: Mapping[str, TensorSlice],
    owners: Mapping[str, StateOwner],
    *,
    left_out: Container[str] = (),
    device: torch.device = CPU,
) -> None:
    """Fill a model from worker 0's checkpoint, and make it equal on all workers; all must call it.

    Of a model that is split, one whole tensor at a time is read and sent, and each worker keeps its part. Of one of
    which workers have different tensors (`owners`), the owners keep it. What the checkpoint has `left_out`, by full
    names, stays as it is. Persistent buffers that are None here, and were
    filled in the checkpoint, are made on `device`. Raises CheckpointError where the checkpoint is of another model.
    """
    forms, old = group.broadcast_object(None if checkpoint is None else _checkpoint_contents(name, model, checkpoint))
    _make_buffers(model, forms, device)
    tensors, extra_here = model_entries(model)
    extra = {**{key.removeprefix(f"{name}."): value for key, value in old.items()}, **plain["extra"].get(name, {})}
    _require_extra(name, extra_here, extra)
    present = {f"{name}.{key}": value for key, value in tensors.items()}
    in_parts = {key for key, value in present.items() if is_sharded(value) or key in slices or key in owners}
    wanted = {key: value for key, value in present.items() if key not in left_out}
    split = {key: value for key, value in wanted.items() if key in in_parts}
    if checkpoint is not None:
        shapes = {
            key: value.new_empty(whole_shape(value, slices.get(key)), device="meta") for key, value in split.items()
        }
        checkpoint.tie(_tied_names(name, model, wanted))
        checkpoint.require({**wanted, **shapes, **old}, prefix=f"{name}.")
        checkpoint.load_into({key: value for key, value in wanted.items() if key not in split})
    named = model.named_parameters(remove_duplicate=False)
    forget_origins(one for key, one in named if f"{name}.{key}" in wanted)  # worker 0 has the checkpoint's numbers now
    set_extra(model, extra)
    for key, target in split.items():
        shape = whole_shape(target, slices.get(key))
        complete = _broadcast_tensor(key, checkpoint, group, shape=shape, dtype=target.dtype)
        if not target.is_meta:
            fill_local(target, complete, slices.get(key))
    if not owners.keys().isdisjoint(in_parts):
        return  # what no checkpoint holds was made equal when the model was split
    own = {id(parameter) for key, parameter in model.named_parameters() if f"{name}.{key}" in in_parts}
    rest = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in own]
    send_from_first(without_same_files(rest, group), group)


_BufferForms = dict[str, tuple[torch.Size, torch.dtype]]


def _checkpoint_contents(name: str, model: nn.Module, checkpoint: Checkpoint) -> tuple[_BufferForms, dict[str, Tensor]]:
    """What all have to know of a checkpoint: shapes and types of the model's persistent buffers, by their names in it,
    and by full names the extra states that are stored as tensors, as early versions did."""
    there = set(checkpoint.names)
    buffers = {path: f"{name}.{path}" for path, _, _ in persistent_buffers(model)}
    forms = {path: (checkpoint.shape(key), checkpoint.dtype(key)) for path, key in buffers.items() if key in there}
    return forms, checkpoint.load(key for key in checkpoint.names if key.startswith(f"{name}.") and is_extra_state(key))


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
    present = [[parameter_name(p, names, name) for p in options["params"]] for options in optimizer.param_groups]
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
    split = {names[id(p)]: p for p in held if is_sharded(p) or names[id(p)] in registry.slices}
    absent = {names[id(p)] for p in held if p.is_meta}
    is_parted = any(names[id(p)] in registry.owners for p in held)
    elsewhere = absent | {key for key in split if _is_owned_elsewhere(name, key, registry)}
    state = {key: values for key, values in state.items() if names[id(held[key])] not in elsewhere}
    offloaded, by_name = registry.offloaded.get(name), {names[id(p)]: p for p in held}
    one_by_one = offloaded is not None or is_parted
    in_parts = {key: one for key, one in split.items() if f"{name}.state.{key}" not in registry.whole_states}
    one_by_one = one_by_one or len(in_parts) < len(split)
    for key, tensor in _optimizer_tensors(name, checkpoint, group, in_parts, registry.slices, one_by_one=one_by_one):
        parameter, entry = _key_parts(name, key)
        if parameter in elsewhere:
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


def _is_owned_elsewhere(name: str, parameter: str, registry: StateRegistry) -> bool:
    """Whether another worker steps a parameter, and has its state."""
    whole = registry.whole_states.get(f"{name}.state.{parameter}")
    return whole is not None and not whole.is_here


def _optimizer_tensors(
    name: str,
    checkpoint: TensorSource | None,
    group: WorkerGroup,
    split: Mapping[str, Tensor],
    slices: Mapping[str, TensorSlice],
    *,
    one_by_one: bool,
) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors on the CPU, read by worker 0 and sent to the others; of `split` parameters, by their full
    names, only what is here. `one_by_one`: never all of them at a time."""
    is_here = isinstance(checkpoint, InMemoryTensors)  # whose tensors are local parts already
    if one_by_one or (split and not is_here):
        contents: list[tuple[str, torch.Size, torch.dtype]] | None = None
        if checkpoint is not None:
            keys = [key for key in checkpoint.names if key.startswith(f"{name}.state.")]
            contents = [(key, checkpoint.shape(key), checkpoint.dtype(key)) for key in keys]
        for key, shape, dtype in group.broadcast_object(contents):
            complete = _broadcast_tensor(key, checkpoint, group, shape=shape, dtype=dtype)
            owner = _key_parts(name, key)[0]
            if owner in split and complete.dim() and not is_here:
                complete = part_like(complete, split[owner], slices.get(owner))
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


def set_extra(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Give back what modules keep by `get_extra_state`; a tensor as a copy, on the device of the present one."""
    for key, value in extra.items():
        module = model.get_submodule(key.rpartition(".")[0])
        module.set_extra_state(_copy_for(module, value) if isinstance(value, Tensor) else value)


def _copy_for(module: nn.Module, extra: Tensor) -> Tensor:
    present = module.get_extra_state()
    return extra.to(present.device if isinstance(present, Tensor) else extra.device, copy=True)
