"""The tensors of prepared objects as they are on this worker: collected by name, and put back at the same place.

What one worker has fits any worker at the same place of a replica as it is, so nothing is sent or regrouped here.
Checkpoints on disk are for any layout; see `checkpoint_loading` for those.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import SingleWorkerGroup
from paceline.comm.remote_tensors import is_remote, remote_tensor
from paceline.comm.sharded_tensors import DTensorLayout, local_part
from paceline.errors import CheckpointError
from paceline.parallel.offload.memory import OffloadMemory
from paceline.worker.state.checkpoint_loading import load_object, load_optimizer, set_extra
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.state.tensor_source import InMemoryTensors
from paceline.worker.step.model_buffers import persistent_buffers

__all__ = [
    "copy_tensors",
    "fill_model",
    "fill_optimizer",
    "named_tensors",
    "optimizer_layouts",
    "restore_tensors",
]


def named_tensors(registry: StateRegistry, *, with_caches: bool) -> dict[str, Tensor]:
    """All tensors of the state, live, not copied; `with_caches`: also buffers that do not persist, which each worker
    may have for itself. Of what is split, the rows that are here; nothing of other stages, or of servers."""
    found: dict[str, Tensor] = {}
    for prefix, model in registry.models.items():
        found.update((f"{prefix}.{key}", parameter) for key, parameter in model.named_parameters())
        found.update(
            (_full_name(prefix, path, key), buffer)
            for path, module, key, buffer in _buffers(model)
            if with_caches or not _is_cache(module, key)
        )
    found.update(registry.optimizer_tensors())
    return {name: local_part(value) for name, value in found.items() if not value.is_meta and not is_remote(value)}


def optimizer_layouts(registry: StateRegistry) -> dict[str, DTensorLayout]:
    """Return the layouts of the optimizers' DTensors, of which `named_tensors` has only the local parts."""
    found = ((name, DTensorLayout.of(value)) for name, value in registry.optimizer_tensors().items())
    return {name: layout for name, layout in found if layout is not None}


def copy_tensors(
    registry: StateRegistry, tensors: Mapping[str, Tensor], *, instead_of: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Copy live tensors to the CPU, into the memory of `instead_of` where names and shapes fit.

    A copy of offloaded state lies where that state lies: in the host's memory or on its disk.
    """
    offloaded = {f"{prefix}.state.": one.memory for prefix, one in registry.offloaded.items()}
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        memory = next((one for start, one in offloaded.items() if name.startswith(start)), None)
        found[name] = _copied(value, instead_of.get(name), memory)
    return found


@torch.no_grad()
def restore_tensors(
    registry: StateRegistry,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, DTensorLayout],
    plain: Mapping[str, Any],
) -> None:
    """Overwrite everything that is prepared; nothing keeps a reference to `tensors`."""
    for name in registry.models:
        fill_model(name, registry, tensors, plain)
    for name in registry.optimizers:
        # torch takes over the tensors that it is given where type and device fit.
        state = f"{name}.state."
        keeps = name in registry.offloaded  # what is offloaded is copied to where it lies, one by one
        own = {
            key: value if keeps and value.dim() else value.clone()
            for key, value in tensors.items()
            if key.startswith(state)
        }
        fill_optimizer(name, registry, own, layouts, plain)
    for name, thing in registry.objects.items():
        load_object(name, thing, plain)


@torch.no_grad()
def fill_model(name: str, registry: StateRegistry, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Overwrite a model by what a worker at the same place of a replica had here (`named_tensors`).

    Raises CheckpointError where that was another model, or split otherwise.
    """
    model = registry.models[name]
    for key, parameter in model.named_parameters():
        full_name = f"{name}.{key}"
        if full_name in registry.tables and full_name not in tensors:
            parameter.data = remote_tensor(parameter)  # it lies on servers, as that worker's did
        elif not parameter.is_meta:
            target = local_part(parameter)
            _require(full_name, tensors, target)
            target.copy_(tensors[full_name])
    _fill_buffers(name, model, tensors, registry.device)
    set_extra(model, plain["extra"].get(name, {}))


@torch.no_grad()
def fill_optimizer(
    name: str,
    registry: StateRegistry,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, DTensorLayout],
    plain: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that a worker at the same place had; it may keep `tensors` for its own."""
    received = InMemoryTensors(tensors, layouts, prefix=f"{name}.state.", parameters=registry.parameters())
    load_optimizer(name, registry.optimizers[name], registry, plain, received, SingleWorkerGroup())


def _require(name: str, tensors: Mapping[str, Tensor], target: Tensor) -> None:
    there = tensors[name].shape if name in tensors else None
    if there != target.shape:
        had = "nothing of that name" if there is None else f"the shape {list(there)}"
        raise CheckpointError(
            f"{name} has the shape {list(target.shape)} here, and the worker whose state this is has {had}: all "
            "workers must prepare the same model"
        )


def _fill_buffers(prefix: str, model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Overwrite buffers. One that was filled since is None again, and one that is None but was filled there is made on
    `device`; a cache that is not there, or has another shape, is left alone."""
    for path, module, key, buffer in _buffers(model):
        if buffer.is_meta:
            continue  # of another stage
        name = _full_name(prefix, path, key)
        before = tensors.get(name)
        if before is not None and before.shape == buffer.shape:
            buffer.copy_(before)
        elif before is None and not _is_cache(module, key):
            setattr(module, key, None)
        elif not _is_cache(module, key):
            _require(name, tensors, buffer)
    for path, module, key in persistent_buffers(model):
        name = f"{prefix}.{path}"
        if name in tensors and getattr(module, key) is None:
            setattr(module, key, tensors[name].to(device, copy=True))


def _buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Path of the module, the module, name and buffer; one that modules share comes with each."""
    return [
        (path, module, key, buffer)
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]


def _full_name(prefix: str, path: str, key: str) -> str:
    return ".".join(filter(None, (prefix, path, key)))


def _is_cache(module: nn.Module, key: str) -> bool:
    return key in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]: torch has it nowhere else


def _copied(value: Tensor, room: Tensor | None, memory: OffloadMemory | None) -> Tensor:
    """A copy on the CPU, in the memory `room` of an older copy where that fits."""
    value = value.detach()
    if room is None or room.shape != value.shape or room.dtype != value.dtype:
        if memory is None or not value.dim():
            return value.to("cpu", copy=True)
        room = memory.empty_like(value)
    room.copy_(value)
    if memory is not None:
        memory.release([room, value])
    return room
