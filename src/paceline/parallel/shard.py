"""Split a model's state over the workers of a replica (ZeRO), by torch's `fully_shard`.

Each repeated block is a *unit*, and what is in no block is one more. Between steps a worker holds its rows of every
parameter. A unit's parameters are gathered before its forward; its gradients are summed over the replica, row by row,
after its backward. What is kept meanwhile is the layout's `zero`:

    1   parameters from the step's first forward to its last backward; whole gradients, summed in the last run
    2   parameters as for 1; gradients are summed after each run
    3   parameters only around a unit's forward and its backward

The sums are plain: no division by the number of workers, whose losses are weighted already. A *run* is one forward and
backward; all workers of a replica make as many in a walk, since each gathers from all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.ring import Ring
from paceline.comm.split import local_part
from paceline.errors import PlanError
from paceline.parallel.exchange import Gather, Scatter, Traffic
from paceline.parallel.recompute import repeated_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardedModel", "Shards", "refuse_unsplittable", "units_of"]

Slot = tuple[nn.Module, str, Parameter]  # where a parameter is registered, and what is registered while it is split
HALF = torch.bfloat16


class Shards:
    """All sharded models of one worker: what has to be said to them before, between and after runs."""

    def __init__(self) -> None:
        self._models: list[ShardedModel] = []
        self.traffic = Traffic()

    def add(self, model: ShardedModel) -> None:
        self._models.append(model)

    def begin(self) -> None:
        """A walk begins: nothing is gathered that the optimizer may have changed since, and nobody used anything."""
        self.traffic.trail = 0
        for model in self._models:
            model.close()
            model.used.clear()

    def before_run(self, *, is_last: bool, is_void: bool) -> None:
        """The walk's next forward and backward come; a void run is noted nowhere."""
        for model in self._models:
            model.before_run(is_last=is_last, is_void=is_void)

    def close(self) -> None:
        """Give back what is gathered: each model's registered parameters are its own rows again."""
        for model in self._models:
            model.close()

    def give_up(self) -> None:
        """A walk was left early: forget gradients that are not summed yet, and whatever was under way."""
        for model in self._models:
            model.give_up()

    def is_used(self, parameter: Parameter) -> bool | None:
        """Whether a run of this walk gave a parameter a gradient; None of one that is in no sharded model."""
        found: bool | None = None
        for model in self._models:
            if id(parameter) in model.parameters:
                found = bool(found) or id(parameter) in model.used
        return found

    @property
    def sums_at_last(self) -> bool:
        """Whether gradients are summed by the last run's backward alone."""
        return any(model.zero == 1 for model in self._models)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of parameters that are here."""
        return sum(model.num_bytes for model in self._models)


class ShardedModel:
    """A model whose parameters have been split, in place; make it on all workers of the replica alike."""

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        zero: int,
        precision: str,
        ring: Ring,
        group: str,
        traffic: Traffic,
        on_host: bool = False,
    ) -> None:
        """`mesh`: of one dim, the replica's workers. `group`: what the ring calls them. `traffic` is added to.
        `on_host`: the rows of parameters and gradients are kept in the host's memory. Raises PlanError.
        """
        refuse_unsplittable(model)
        self.zero = zero
        self._on_host = on_host
        self.used: set[int] = set()  # ids of parameters
        self._root: Any = model  # torch makes it an FSDPModule
        self._is_void = False
        self._units: list[Any] = []  # torch's FSDPModule
        units = units_of(model)
        for name, unit in [*units, ("", model)]:
            sharded = self._split(unit, mesh=mesh, is_root=unit is model, is_half=precision == "bf16")
            told = name or type(model).__name__
            sharded.set_custom_all_gather(Gather(ring, group=group, unit=told, traffic=traffic))
            sharded.set_custom_reduce_scatter(Scatter(ring, group=group, unit=told, traffic=traffic))
            self._units.append(sharded)
        self._slots = {unit: _slots_of(unit, inner=(one for _, one in units)) for unit in self._units}
        self.parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._gathered: dict[int, Parameter] = {}  # id of a split parameter -> the whole one that autograd sees
        for unit in self._units:
            # Registered after torch's own hook, so it runs when the unit's parameters are gathered.
            follow = functools.partial(self._follow, self._slots[unit])
            unit.register_forward_pre_hook(torch.compiler.disable(follow))

    @property
    def num_bytes(self) -> int:
        return sum(local.numel() * local.element_size() for local in map(local_part, self.parameters.values()))

    def before_run(self, *, is_last: bool, is_void: bool) -> None:
        self._is_void = is_void
        self._root.set_requires_gradient_sync(is_last or self.zero > 1)
        self._root.set_reshard_after_backward(is_last or self.zero == 3)

    def close(self) -> None:
        for unit in self._units:
            unit.reshard()

    def give_up(self) -> None:
        for parameter in self._gathered.values():
            parameter.grad = None
        reset = getattr(self._root, "reset_iter_state", None)  # torch 2.13; before it, nothing forgets a broken forward
        if reset is not None:
            reset()
        self.close()

    def _split(self, unit: nn.Module, *, mesh: DeviceMesh, is_root: bool, is_half: bool) -> Any:
        """Make a module one of torch's FSDPModules."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # Under autocast alone a unit's 16-bit copies would live from its forward to its backward, gathered or not:
        # blocks are gathered in 16 bits instead. The rest stays as autocast wants it, so that sums along the residual
        # stream keep their precision. Gradients are summed in fp32.
        half = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = half if is_half and not is_root else MixedPrecisionPolicy()
        # None: the root, which backward needs first, stays gathered between forward and backward.
        reshard = False if self.zero < 3 else None if is_root else True
        on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._on_host else OffloadPolicy()
        sharded: Any = fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=on_host
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch 2.13
            # Micro-batches may use other parameters on other workers: all send the same, zeros for the unused.
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
        return sharded

    def _follow(self, slots: Sequence[Slot], *_: Any) -> None:
        """Note which whole parameters get a gradient: the split ones get zeros where they are not used."""
        for module, name, split in slots:
            whole = getattr(module, name)
            if whole is not split and whole.requires_grad and self._gathered.get(id(split)) is not whole:
                self._gathered[id(split)] = whole
                whole.register_post_accumulate_grad_hook(functools.partial(self._arrived, id(split)))

    def _arrived(self, number: int, _: Tensor) -> None:
        if not self._is_void:
            self.used.add(number)


def units_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules that are gathered by themselves: repeated blocks, but for those that share parameters with
    anything outside of them, and containers, which have no forward of their own."""
    found = [
        (name, block)
        for name, block in repeated_blocks(model)
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict)) and block is not model
    ]
    inside = {module for _, block in found for module in block.modules()}
    outside = {id(p) for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    holders: dict[int, int] = {}
    for _, block in found:
        for parameter in block.parameters():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        (name, block)
        for name, block in found
        if all(id(p) not in outside and holders[id(p)] == 1 for p in block.parameters())
    ]


def refuse_unsplittable(model: nn.Module) -> None:
    """Raise one PlanError that names every parameter and module that `fully_shard` cannot split, and what to do."""
    found: list[str] = []
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        found.append(f"the model is a {type(model).__name__}, which has no forward: put it into a module that has one")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            found.append(f"{name} is a single number without a dim: make it nn.Parameter(torch.ones(1)), of one dim")
        elif not parameter.is_contiguous():
            found.append(f"{name} is not contiguous in memory (strides {parameter.stride()}): use .contiguous()")
        if parameter.is_complex() or not parameter.is_floating_point():
            found.append(f"{name} is of {_short(parameter.dtype)}: only real floating numbers are split")
    for name, unit in [*units_of(model), ("what is in no block", model)]:
        kinds = {p.dtype for _, _, p in _slots_of(unit, inner=(one for _, one in units_of(model)))}
        if len(kinds) > 1:
            some = " and ".join(sorted(map(_short, kinds)))
            found.append(f"{name} mixes {some}, but travels as one: give its parameters one type")
    if found:
        listed = found[0] if len(found) == 1 else "\n  - " + "\n  - ".join(found)
        raise PlanError(f"Layout(shard=...) cannot split {type(model).__name__}: {listed}")


def _slots_of(unit: nn.Module, *, inner: Iterable[nn.Module]) -> list[Slot]:
    """Where a unit's own parameters are registered, without those of the units inside it."""
    others = set(itertools.chain.from_iterable(one.modules() for one in inner if one is not unit))
    modules = [one for one in unit.modules() if one not in others]
    return [(one, name, parameter) for one in modules for name, parameter in one.named_parameters(recurse=False)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
