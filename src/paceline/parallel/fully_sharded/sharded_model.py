"""Shard a model's state over the workers of a replica (ZeRO), by torch's `fully_shard`.

Each repeated block is a *unit*, and everything outside of blocks is one more. Between steps a worker holds its rows of
every parameter. A unit's parameters are gathered before its forward; its gradients are summed over the replica, row by
row, after its backward. The layout's `zero` says what is kept meanwhile:

    1   parameters from the step's first forward to its last backward; whole gradients, summed in the last run
    2   parameters as for 1; gradients are summed after each run
    3   parameters only around a unit's forward and its backward

Distributed experts are units of their own, whose rows are split over the workers with the same experts. Everything else
is split over all workers of the replica that run different micro-batches.

Where a schedule computes gradients of weights after those of inputs (*late* ones), they are summed afterwards. Under
zero=3 parameters are then gathered once more for that half of a backward.

Sums are not divided by the number of workers, because losses are weighted already. A *run* is one forward and backward.
All workers of a replica make the same number of runs in a gradient pass, since each gathers from all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.comm.sharded_tensors import is_sharded, local_part
from paceline.errors import PlanError
from paceline.parallel.class_name import class_name
from paceline.parallel.fully_sharded.collectives import (
    ShardAllGather,
    ShardCollectives,
    ShardReduceScatter,
    reduce_late_gradients,
)
from paceline.parallel.fully_sharded.file_rows import FileRows
from paceline.parallel.fully_sharded.sharded_units import (
    registered,
    require_splittable,
    slots_of,
    stays_whole,
    tie_again,
    trained_types,
    units_of,
)
from paceline.parallel.fully_sharded.user_access import watch_access
from paceline.parallel.gradient_queries import backward_calls
from paceline.parallel.part_dtype import convert_rows, later_dtype
from paceline.parallel.partial_parameter import mark_partial
from paceline.parallel.precision import HALVES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardGroup", "ShardedModel", "ShardedModels"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """The workers that split rows among them."""

    mesh: DeviceMesh  # one-dimensional
    group: WorkerGroup
    name: str  # their name in the flight recorder
    is_staged: bool = False  # a device's tensors go through the host, over `group`


class ShardedModels:
    """All sharded models of one worker: the calls that are due before, between and after runs."""

    def __init__(self) -> None:
        self._models: list[ShardedModel] = []
        self.traffic = ShardCollectives()

    def add(self, model: ShardedModel) -> None:
        self._models.append(model)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within it nothing is gathered, so forwards of modules that are sharded separately see the registered
        parameters."""
        for model in self._models:
            model.is_still = True
        try:
            yield
        finally:
            for model in self._models:
                model.is_still = False

    def begin(self) -> None:
        """Begin a gradient pass: free gathered parameters, which the optimizer may have changed, and forget which were
        used."""
        self.traffic.trail = 0
        for model in self._models:
            model.close()
            model.used.clear()

    def before_run(self, *, is_last: bool, is_void: bool) -> None:
        """Announce the next forward and backward of the gradient pass. A void run (of an empty batch) does not count as
        use."""
        for model in self._models:
            model.before_run(is_last=is_last, is_void=is_void)

    def after_inputs(self, model: nn.Module) -> None:
        """Called when a run's gradients of inputs are there, in a model whose gradients of weights come late."""
        for one in self._of(model):
            one.after_inputs()

    def before_weights(self, model: nn.Module) -> None:
        """Called before the deferred gradients of weights of one run."""
        for one in self._of(model):
            one.before_weights()

    def after_weights(self, model: nn.Module, *, is_last: bool) -> None:
        """Called when they are there; all workers of the replica must call it in the same order."""
        for one in self._of(model):
            one.after_weights(is_last=is_last)

    def _of(self, model: nn.Module) -> list[ShardedModel]:
        return [one for one in self._models if one.model is model]

    def close(self) -> None:
        """Free what is gathered: each model's registered parameters are its own rows again."""
        for model in self._models:
            model.close()

    def give_up(self) -> None:
        """Called when a gradient pass was left early: discard gradients that are not summed yet, and whatever is under
        way."""
        for model in self._models:
            model.give_up()

    def is_used(self, parameter: Parameter) -> bool | None:
        """Return whether a run of this gradient pass gave a parameter a gradient; None if no sharded model has it."""
        found: bool | None = None
        for model in self._models:
            if id(parameter) in model.parameters:
                found = bool(found) or id(parameter) in model.used
        return found

    def note_used(self, parameters: Iterable[Parameter]) -> None:
        """Count sharded parameters as used, whose gradients come from elsewhere than runs of this gradient pass."""
        found = {id(one) for one in parameters}
        for model in self._models:
            model.used |= found & model.parameters.keys()

    def take_used(self) -> list[Parameter]:
        """Return the sharded parameters that runs have used since the last gradient pass began, and forget that."""
        found = [model.parameters[number] for model in self._models for number in model.used]
        for model in self._models:
            model.used.clear()
        return found

    def gathered(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the name and the whole of each parameter that forwards have seen gathered."""
        for model in self._models:
            yield from model.gathered()

    @property
    def reduces_on_last_pass(self) -> bool:
        """Whether gradients are summed only by the last run's backward."""
        return any(model.zero == 1 for model in self._models)

    @property
    def num_bytes(self) -> int:
        """Bytes of the local rows of parameters."""
        return sum(model.num_bytes for model in self._models)


class ShardedModel:
    """A model whose parameters are sharded in place; all workers of the replica must make it in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        rows: ShardGroup,
        zero: int,
        precision: str,
        recorder: FlightRecorder,
        traffic: ShardCollectives,
        on_host: bool = False,
        units: Sequence[str] = (),
        apart: Sequence[tuple[str, nn.Module]] | None = None,
        experts: Sequence[tuple[str, nn.Module]] = (),
        expert_rows: ShardGroup | None = None,
        is_late: bool = False,
    ) -> None:
        """Shard `model` over `rows`, the replica's workers, and add its traffic to `traffic`; raises PlanError.

        `units`: names of modules to gather separately, in place of repeated blocks. `apart`: shard only these modules,
        each by itself, because they are called from elsewhere than the model's own forward; everything else stays
        whole. `on_host`: keep the rows of parameters and gradients in the host's memory. `experts`: modules with some
        of the model's experts, whose rows are split over `expert_rows`. `is_late`: gradients of weights come after
        those of inputs.
        """
        require_splittable(model, units)
        self.model, self.zero, self._precision = model, zero, precision
        self._is_late = is_late
        self._sums: dict[
            Any, tuple[ShardReduceScatter, ShardGroup]
        ] = {}  # by unit: how its gradients are summed, and over which workers
        self._on_host = on_host
        self.used: set[int] = set()  # ids of parameters
        self.is_still = False
        self._met: set[nn.Module] = set()  # units that have run
        self._is_void = False
        self._units: list[Any] = []  # torch's FSDPModules
        inside = {one for _, module in experts for one in module.modules()}
        blocks = [pair for pair in units_of(model, units) if pair[1] not in inside]
        whole = [("", model)] if apart is None else []
        # On the CPU torch has no norm of fp32 inputs with 16-bit weights, and autocast casts none of them. Late
        # gradients accumulate whole, for which 16 bits are too few.
        is_half = precision in HALVES and rows.mesh.device_type != "cpu" and not is_late
        half = {inner for _, block in blocks for inner in block.modules()} if is_half else set[nn.Module]()
        before = registered(model)
        self._set_apart = {  # other workers' experts, and what every worker keeps
            parameter for parameter in model.parameters() if parameter.is_meta or stays_whole(parameter)
        }
        self._roots: list[Any] = []  # of torch's trees of modules
        parts = [(module, expert_rows or rows) for _, module in experts]
        parts += [(module, rows) for _, module in [*(blocks if apart is None else apart), *whole]]
        files = FileRows(((unit, over.mesh) for unit, over in parts), set_apart=self._set_apart)
        for name, module in experts:
            gather_module = self._split(
                _GatherModule(module, self),
                over=expert_rows or rows,
                is_root=False,
                is_half=module in half,
                files=files,
            )
            self._set_apart.update(module.parameters())
            self._note(gather_module, name, over=expert_rows or rows, recorder=recorder, traffic=traffic)
            self._roots.append(gather_module)
        for name, module in [*(blocks if apart is None else apart), *whole]:
            unit = module if apart is None else _GatherModule(module, self)
            sharded = self._split(unit, over=rows, is_root=module is model, is_half=module in half, files=files)
            self._note(sharded, name or class_name(model), over=rows, recorder=recorder, traffic=traffic)
            if apart is not None or module is model:
                self._roots.append(sharded)
        files.release()
        tie_again(model, before)
        gather_modules = set(self._units[: len(experts)])
        inner = [*(module for _, module in experts), *(block for _, block in blocks if apart is None)]
        self._slots = {unit: slots_of(unit, inner=() if unit in gather_modules else inner) for unit in self._units}
        self._mixed = [unit for unit, slots in self._slots.items() if len({p.dtype for _, _, p in slots}) > 1]
        held = model.parameters() if apart is None else [p for slots in self._slots.values() for _, _, p in slots]
        self.parameters = {id(parameter): parameter for parameter in held}
        self._of_experts = {id(split) for unit in gather_modules for _, _, split in self._slots[unit]}
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._gathered: dict[int, Parameter] = {}  # id of a sharded parameter -> the whole one that autograd sees
        for unit in self._units:
            # Registered after torch's own hook, so it runs when the unit's parameters are gathered.
            follow = functools.partial(self._follow, unit)
            unit.register_forward_pre_hook(torch.compiler.disable(follow))
        self._storages = watch_access(model, before, self._slots, close=self.close, is_root=apart is None)

    @property
    def num_bytes(self) -> int:
        return sum(local.numel() * local.element_size() for local in map(local_part, self.parameters.values()))

    def gathered(self) -> Iterator[tuple[str, Parameter]]:
        found = ((one.name, one.whole) for one in self._storages)
        return ((name, whole) for name, whole in found if whole is not None)

    def before_run(self, *, is_last: bool, is_void: bool) -> None:
        self._is_void = is_void
        for unit in self._mixed:
            if len(kinds := trained_types(self._slots[unit])) > 1:
                raise PlanError(
                    f"parameters of a unit that have different types ({' and '.join(kinds)}) are trained under "
                    "Layout(shard=...) since some were thawed (requires_grad_()), but its gradients travel as one: "
                    "give them one type, for example model.float() before worker.prepare(model)"
                )
        for unit in self._units:
            unit.set_requires_gradient_sync(not self._is_late and (is_last or self.zero > 1), recurse=False)
            unit.set_reshard_after_backward(not self._is_late and (is_last or self.zero == 3), recurse=False)

    def after_inputs(self) -> None:
        if self.zero == 3:
            self.close()

    def before_weights(self) -> None:
        for unit in self._units if self.zero == 3 else ():
            unit.unshard()

    def after_weights(self, *, is_last: bool) -> None:
        for unit in self._units if is_last or self.zero > 1 else ():
            held = {id(one): one for _, _, one in self._slots[unit] if one.requires_grad}
            scatter, over = self._sums[unit]
            pairs: list[tuple[Any, Parameter | None]] = [
                (one, self._gathered.get(number)) for number, one in held.items() if is_sharded(one)
            ]
            reduce_late_gradients(pairs, scatter, over.mesh.get_group())
        if is_last or self.zero == 3:
            self.close()

    def close(self) -> None:
        for unit in self._units:
            unit.reshard()

    def give_up(self) -> None:
        for parameter in self._gathered.values():
            parameter.grad = None
        for root in self._roots:
            reset = getattr(root, "reset_iter_state", None)  # torch 2.13; older versions cannot reset a broken forward
            if reset is not None and root in self._met:  # the first forward creates what it resets
                reset()
        self.close()

    def _note(
        self, sharded: Any, name: str, *, over: ShardGroup, recorder: FlightRecorder, traffic: ShardCollectives
    ) -> None:
        """Route a unit's collectives over shared memory where possible, and record them under the unit's name."""
        shared = over.group if over.group.shares_memory or over.is_staged else None
        stages = over.is_staged
        sharded.set_custom_all_gather(
            ShardAllGather(recorder, group=over.name, unit=name, traffic=traffic, over=shared, stages=stages)
        )
        scatter = ShardReduceScatter(recorder, group=over.name, unit=name, traffic=traffic, over=shared, stages=stages)
        sharded.set_custom_reduce_scatter(scatter)
        self._sums[sharded] = scatter, over
        self._units.append(sharded)

    def _split(self, unit: nn.Module, *, over: ShardGroup, is_root: bool, is_half: bool, files: FileRows) -> Any:
        """Make a module one of torch's FSDPModules."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # Under autocast alone a unit's 16-bit copies would live from its forward to its backward, gathered or not. So
        # blocks are gathered in 16 bits. The rest follows autocast, so that sums along the residual stream keep their
        # precision. Gradients are summed in fp32.
        half = MixedPrecisionPolicy(
            param_dtype=HALVES.get(self._precision), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        policy = half if is_half and not is_root else MixedPrecisionPolicy()
        # None: the root, which backward needs first, stays gathered between forward and backward.
        reshard = False if self.zero < 3 else None if is_root else True
        on_host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self._on_host else OffloadPolicy()
        read = files.of(unit)
        later = [
            (owner, name, later_dtype(one))
            for owner in unit.modules()
            for name, one in owner.named_parameters(recurse=False)
            if later_dtype(one) != one.dtype and one not in self._set_apart
        ]
        sharded: Any = fully_shard(
            unit,
            mesh=over.mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=on_host,
            ignored_params=self._set_apart,
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        if hasattr(sharded, "set_reduce_scatter_unused_params"):  # torch 2.13
            # Micro-batches may use different parameters on other workers: all send the same, zeros for the unused.
            sharded.set_reduce_scatter_unused_params(True, recurse=False)
        files.were_read(read)
        convert_rows(sharded, later)
        return sharded

    def _follow(self, unit: nn.Module, *_: Any) -> None:
        """Record which whole parameters get a gradient; sharded ones get zeros where they are not used."""
        self._met.add(unit)
        for module, name, split in self._slots[unit]:
            whole = getattr(module, name)
            if whole is not split and whole.requires_grad and self._gathered.get(id(split)) is not whole:
                self._gathered[id(split)] = whole
                held = getattr(split, "held", None)
                if held is not None and type(whole) is Parameter:
                    mark_partial(whole, held)
                whole.register_post_accumulate_grad_hook(functools.partial(self._arrived, id(split)))

    def _arrived(self, number: int, _: Tensor) -> None:
        backward_calls.require_own(self._names.get(number, "a parameter"))
        # Experts get tokens of other workers, whose runs may count although this worker's run is void.
        if not self._is_void or number in self._of_experts:
            self.used.add(number)


class _GatherModule(nn.Module):
    """Makes a module gather within its own forward, inside of all wrappers around it; `fully_shard` shards this
    object.
    """

    def __init__(self, module: nn.Module, model: ShardedModel) -> None:
        super().__init__()
        self.inside = module
        self._forward = forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if model.is_still else self(*args, **kwargs)

        module.forward = torch.compiler.disable(run)  # it is called from within a compiled block where it has experts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
