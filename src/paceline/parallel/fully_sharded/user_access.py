"""What user code does to sharded parameters past the model: right as in one process, or refused by name.

Torch's `fully_shard` keeps its own reference to the rows of each parameter. So it would not notice `p.data = x`, a copy
of the model, other tensors in the place of parameters (`torch.func.functional_call`), or a gradient of gradients. And
the parameters from before `worker.prepare` are no longer those of the model.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.sharded_tensors import is_sharded, rows_of
from paceline.errors import PlanError
from paceline.parallel.absent_tensors import AbsentParameter
from paceline.parallel.fully_sharded import sharded_numbers
from paceline.parallel.fully_sharded.sharded_parts import mark_rows_of_part
from paceline.parallel.model_copies import refuse_copies
from paceline.parallel.parameter_watch import TORCH_DATA, data_of, note_data_set
from paceline.parallel.partial_parameter import PartialParameter

__all__ = ["ShardStorage", "watch_access"]

# where a parameter is registered, and the parameter
Slot = tuple[nn.Module, str, Parameter]

_OF_TENSORS: dict[str, Any] = dict(vars(torch.Tensor.__mro__[1]))  # what torch's C++ gives to tensors
_STORAGES: dict[int, ShardStorage] = {}  # by id of the sharded parameter


class ShardStorage:
    """Where torch keeps the rows of one sharded parameter; `p.data = x` puts other rows there."""

    def __init__(self, parameter: Parameter, name: str, held: Any, close: Callable[[], None]) -> None:
        """`held`: torch's FSDPParam. `close()` frees the whole parameters that were gathered from the old rows."""
        self._held, self.name, self._close = held, name, close
        number = id(parameter)
        self._parameter = weakref.ref(parameter, lambda _: _STORAGES.pop(number, None))
        _STORAGES[number] = self
        _make_data_assignable()

    @property
    def whole(self) -> Parameter | None:
        """What forwards see while it is gathered."""
        return getattr(self._held, "_unsharded_param", None)

    def assign(self, rows: Tensor) -> Tensor:
        """Keep these rows from now on; returns them as they are kept, which is a copy where torch wants padding."""
        parameter: Any = self._parameter()
        self._close()
        padded, length = self._held.padded_sharded_param_size, rows.shape[0] if rows.dim() else 0
        kept = rows.contiguous()
        if kept.size() != padded:
            kept = rows.new_zeros(padded)
            kept[:length].copy_(rows)
        if self._held.pin_memory and not kept.is_pinned():
            kept = kept.cpu().pin_memory()
        self._held._sharded_param_data = kept.view(-1)
        parameter._local_tensor = kept.narrow(0, 0, length)
        return parameter._local_tensor


def watch_access(
    model: nn.Module,
    before: Iterable[Slot],
    slots: Mapping[Any, Sequence[Slot]],
    *,
    close: Callable[[], None],
    is_root: bool,
) -> list[ShardStorage]:
    """Watch what user code does to a sharded model; returns the storages of its parameters.

    `before`: what was registered before. `slots`: where each of torch's FSDPModules has its sharded parameters.
    `close()` frees what is gathered. `is_root`: the model's own forward gathers.
    """
    sharded_numbers.install()
    names = {id(one): name for name, one in model.named_parameters()}
    storages = _storages_of(slots, names, close)
    for unit, some in slots.items():
        check = functools.partial(_check_registered, some, storages)  # before torch gathers, which would replace them
        unit.register_forward_pre_hook(torch.compiler.disable(check), prepend=True)
    parts = {(module, key): old.held for module, key, old in before if isinstance(old, PartialParameter)}
    for module, key, split in itertools.chain.from_iterable(slots.values()):
        if is_sharded(split) and (module, key) in parts:
            mark_rows_of_part(split, parts[module, key])
    for _, _, old in before:
        if id(old) not in names and type(old) in (Parameter, AbsentParameter, PartialParameter):
            old.__class__ = RetiredParameter
    if is_root:
        for module in (model, *slots):
            refuse_copies(module, "Layout(shard=...)", "rows of its parameters")
        watch: Any = torch.compiler.disable(_watch_output)
        model.register_forward_hook(watch)
    return list(storages.values())


def _storages_of(units: Iterable[Any], names: Mapping[int, str], close: Callable[[], None]) -> dict[int, ShardStorage]:
    """The storages of the sharded parameters of torch's FSDPModules, by the parameters' ids."""
    found: dict[int, ShardStorage] = {}
    for unit in units:
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; older versions have one group
        for group in [state._fsdp_param_group] if groups is None else groups:
            for held in group.fsdp_params if group is not None else ():
                parameter = held.sharded_param
                found[id(parameter)] = ShardStorage(parameter, names.get(id(parameter), "a parameter"), held, close)
    return found


def _check_registered(slots: Sequence[Slot], storages: Mapping[int, ShardStorage], *_: Any) -> None:
    """Refuse other tensors in the places of parameters: a forward would gather ours over them."""
    for module, key, split in slots:
        now = vars(module)["_parameters"].get(key)
        if now is split or (storage := storages.get(id(split))) is None or now is storage.whole:
            continue
        if now is None:
            raise PlanError(
                f"{storage.name} was removed from its module (bias = None, a parametrization, pruning), but under "
                "Layout(shard=...) its forward gathers the prepared parameters. Change the model before "
                "worker.prepare(model), or use Layout(replicas=n)"
            )
        raise PlanError(
            f"the model ran with another tensor in the place of {storage.name} (torch.func.functional_call, or an "
            "assignment to the module), but under Layout(shard=...) its forward gathers the prepared parameters: "
            "write new values into them (p.data = x), or use Layout(replicas=n)"
        )


def _make_data_assignable() -> None:
    """Have `p.data = x` of torch's DTensors put x there: torch's own changes nothing, silently."""
    from torch.distributed.tensor import DTensor

    if "data" not in vars(DTensor):
        DTensor.data = property(data_of, _set_data)  # pyright: ignore[reportAttributeAccessIssue]


def _set_data(tensor: Any, value: Any) -> None:
    note_data_set(tensor)
    storage = _STORAGES.get(id(tensor))
    if storage is None and not (is_sharded(value) and value.placements == tensor.placements):
        TORCH_DATA.__set__(tensor, value)
        return
    name = "a sharded tensor" if storage is None else storage.name
    held = getattr(tensor, "held", None)  # of a part, where layers are split, too
    if held is not None and type(value) is Tensor and tuple(value.shape) == held.whole:
        value = held.part_of(value)
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
        found = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PlanError(
            f".data of {name} was set to {found}, but under Layout(shard=...) it stays {tuple(tensor.shape)} of "
            f"{tensor.dtype}: assign a tensor like it, or change the model before worker.prepare(model)"
        )
    given: Any = value
    is_plain = not is_sharded(value)
    if is_plain:
        first, stop = rows_of(
            tensor.shape[0], index=tensor.device_mesh.get_local_rank(), size=tensor.device_mesh.size()
        )
        rows = given.detach()[first:stop].to(tensor._local_tensor.device)
    elif given.device_mesh == tensor.device_mesh and given.placements == tensor.placements:
        rows = given._local_tensor
    else:
        raise PlanError(
            f".data of {name} was set to a DTensor that is split otherwise ({given.placements}, not "
            f"{tensor.placements}): assign its .full_tensor()"
        )
    rows = rows.detach()
    kept = rows
    if storage is None:
        tensor._local_tensor = rows
    else:
        kept = storage.assign(rows)
    if not is_plain and id(given) not in _STORAGES and kept.data_ptr() != rows.data_ptr():
        given._local_tensor = kept  # as in torch, both have the same memory from now on


class RetiredParameter(Parameter):
    """A parameter from before `worker.prepare`, in whose place the model has a sharded one: its numbers are stale."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HARMLESS or getattr(func, "__self__", None) in GETTERS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise PlanError(
            "a parameter that was taken from the model before worker.prepare(model) is used, but under "
            "Layout(shard=...) the model has another one in its place since then, and this one's numbers are stale: "
            "take parameters after worker.prepare(), or clone them before it"
        )


# Methods and properties that tell nothing of the numbers.
HARMLESS = {
    *("numel", "nelement", "size", "dim", "ndimension", "element_size", "stride", "is_contiguous", "__hash__"),
    *("is_floating_point", "is_complex", "register_hook", "register_post_accumulate_grad_hook", "__len__"),
}
READABLE = {
    *("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_meta", "layout", "is_cuda", "is_sparse"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "grad_fn", "output_nr"),
}
GETTERS = frozenset(_OF_TENSORS[name] for name in READABLE if name in _OF_TENSORS)


def _watch_output(module: nn.Module, args: Any, output: Any) -> None:
    from torch.utils._pytree import tree_leaves

    for one in tree_leaves(output):
        if isinstance(one, Tensor) and one.requires_grad:
            one.register_hook(_refuse_graph)


def _refuse_graph(gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward only with create_graph=True
        raise PlanError(
            "a gradient of gradients (create_graph=True) under Layout(shard=...): torch's fully_shard frees gathered "
            "parameters in the first backward, which the second one needs. Use Layout(replicas=n), or a penalty "
            "without second derivatives"
        )
