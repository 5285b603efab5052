"""Parameters, optimizer states and objects of one worker for all others, or of all for all."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.differentiable import allgather, broadcast_
from paceline.compat.horovod.handles import synchronize
from paceline.compat.horovod.operations import broadcast_async_
from paceline.compat.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "plain_step",
]

Setter = Callable[[Any], None]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of rank `root_rank`: a state_dict, or a list of them or of (name, parameter).

    Raises ValueError for anything else.
    """
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, (str, Tensor)) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    begun = [broadcast_async_(one, root_rank, name, process_set) for name, one in named if isinstance(one, Tensor)]
    for handle in begun:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite an optimizer's state and options with those of rank `root_rank`.

    An optimizer without a state takes one step of zero gradients first, so that all workers have the same tensors.
    `model`: tells which parameters have sparse gradients. Raises ValueError for LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:
        _make_state(optimizer, _sparse_parameters(model))
    state = optimizer.state_dict()
    tensors: list[tuple[str, Tensor]] = []
    values: dict[str, Any] = {}
    setters: dict[str, Setter] = {}
    for index, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            if key != "params":
                values[f"{key}.{index}"] = value
                setters[f"{key}.{index}"] = _setter(optimizer.param_groups[index], key)
        for number in group["params"]:
            # The state itself, not the copy of its dictionaries that `state_dict` may be.
            own = state["state"].get(number, {})
            for key, value in own.items():
                name = f"{key}.{number}"
                if isinstance(value, Tensor):
                    tensors.append((name, value))
                else:
                    values[name] = value
                    setters[name] = _setter(own, key)
    broadcast_parameters(tensors, root_rank, process_set)
    for name, value in broadcast_object(values, root_rank, process_set=process_set).items():
        if name in setters:
            setters[name](value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`, pickled and sent to all members."""
    name = name or type(obj).__name__
    is_root = sessions.current_session().rank == root_rank
    data = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if is_root else _unpickled(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all members, in the order of their ranks."""
    name = name or type(obj).__name__
    data = _pickled(obj)
    lengths = allgather(torch.tensor([data.numel()]), f"{name}.sz", process_set)
    return [_unpickled(part) for part in allgather(data, f"{name}.t", process_set).split(lengths.tolist())]


def plain_step(optimizer: Optimizer) -> None:
    """Take a step of the optimizer itself: without Horovod's part in it, if it has one."""
    getattr(optimizer, "step_without_synchronizing", optimizer.step)()


def _make_state(optimizer: Optimizer, sparse: set[int]) -> None:
    before: list[tuple[Tensor, Tensor]] = []  # weight decay would change them, on those workers that come here
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                before.append((parameter.data, parameter.detach().clone()))
                parameter.grad = torch.zeros_like(parameter.data)
                if isinstance(optimizer, SparseAdam) or (isinstance(optimizer, SGD) and id(parameter) in sparse):
                    parameter.grad = parameter.grad.to_sparse()
    plain_step(optimizer)
    for parameter, weights in before:
        parameter.copy_(weights)


def _sparse_parameters(model: nn.Module | None) -> set[int]:
    if model is None:
        return set()
    return {
        id(one)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.sparse
        for one in module.parameters()
    }


def _setter(table: dict[str, Any], key: str) -> Setter:
    def set_value(value: Any) -> None:
        table[key] = value

    return set_value


def _pickled(obj: Any) -> Tensor:
    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return cloudpickle.loads(bytes(data.numpy()))  # sent by a worker of this run: no stranger can join its groups
