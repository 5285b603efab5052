"""What a model must satisfy for a plan, before any axis looks at it: `require_fit` and `require_open`.

Some models can be trained under no layout: their parameters have no data or no shape, or their weights are packed and
get no gradient. Others were wrapped by something that also averages, splits or compiles, and would do it twice.
TorchScript modules and tensor subclasses can be copied to every worker, but not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.comm.sharded_tensors import is_sharded
from paceline.errors import PlanError, Reason
from paceline.parallel.check.kept_views import kept_views
from paceline.parallel.partial_parameter import PartialParameter
from paceline.parallel.remote_embeddings import tables_of, unfit_tables
from paceline.plan import Compute, Layout, ParameterServer, Plan, Sparse

__all__ = ["require_fit", "require_open"]

# By name, because importing all of them would take longer than most checks.
WRAPPERS = {
    "DistributedDataParallel": "averages gradients",
    "DataParallel": "divides batches among devices",
    "FullyShardedDataParallel": "splits parameters",
}
PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


def require_fit(model: nn.Module, plan: Plan, *, allows_meta: bool = False) -> None:
    """Raise one PlanError with everything in a model that no layout can train, and the remedies.

    `allows_meta`: tensors on the meta device are accepted.
    """
    sparse = unfit_tables(model, plan) if isinstance(plan.sync, ParameterServer) else _sparse(model, plan)
    _refuse(model, [*_lazy(model), *sparse, *_synchronized(model), *(() if allows_meta else _on_meta(model))])


def require_open(model: nn.Module, plan: Plan) -> None:
    """Raise one PlanError with everything in a model that is wrapped, packed or closed to what the plan does to it.

    Where it raises, nothing else should inspect the model.
    """
    _refuse(model, [*_wrapped(model), *_packed(model), *_closed(model, plan.layout, plan.compute)])


def _refuse(model: nn.Module, found: list[Reason]) -> None:
    if found:
        raise PlanError.listing(f"{type(model).__name__} cannot be trained as it is", found)


def _lazy(model: nn.Module) -> Iterator[Reason]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            yield Reason(
                module=name,
                what=f"{name} of {type(model).__name__} has no shape yet (a lazy module):",
                remedy="run one forward before prepare, on inputs of the right shape, as in "
                "model(torch.zeros(1, ...)); or give the module its sizes.",
            )


def _on_meta(model: nn.Module) -> Iterator[Reason]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta and not is_lazy(tensor)]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        yield Reason(
            module=empty[0],
            what=f"{empty[0]}{more} of {type(model).__name__} have no data (made on the meta device), and to fill a "
            "model piece by piece is not built yet.",
            remedy="Make it on the CPU: each worker holds it whole until it is prepared.",
        )


def _sparse(model: nn.Module, plan: Plan) -> Iterator[Reason]:
    for name, module in tables_of(model).items() if not isinstance(plan.wire, Sparse) else ():
        yield Reason(
            module=name,
            what=f"{name} = {module} makes sparse gradients, which only wire=Sparse() and servers take.",
            remedy="Use wire=Sparse(), or sparse=False (and an optimizer for dense gradients, in both cases); or "
            "sync=ParameterServer(), with an optimizer for sparse ones.",
        )


def _synchronized(model: nn.Module) -> Iterator[Reason]:
    for name, _ in _outermost(model, lambda one: isinstance(one, nn.SyncBatchNorm)):
        yield Reason(
            module=name,
            what=f"{name} is a SyncBatchNorm, which sums statistics over processes by torch.distributed in each "
            "forward, while workers run micro-batches of their own.",
            remedy="Use BatchNorm: each micro-batch has its own statistics, the same under every plan, so a larger "
            "Batch(micro=...) has better ones. Or GroupNorm or LayerNorm, which need no batch.",
        )


def _wrapped(model: nn.Module) -> Iterator[Reason]:
    """Yield wrappers that distribute training themselves; the plan already does that."""
    for name, module in _outermost(model, lambda one: bool(_kinds(one) & WRAPPERS.keys())):
        kind = min(_kinds(module) & WRAPPERS.keys())
        yield Reason(
            module=name,
            what=f"{name} is a {kind}, which {WRAPPERS[kind]} by itself, beside the plan.",
            remedy="Prepare the module inside (its .module): the plan says how it is distributed.",
        )
    for name, _ in _outermost(model, _is_split_already):
        yield Reason(
            module=name,
            what=f"{name} has parameters that are split already (fully_shard, DTensors, or another prepared model).",
            remedy="Prepare it before anything splits it. Make models that share modules one module, and prepare that.",
        )


def _packed(model: nn.Module) -> Iterator[Reason]:
    for name, module in _outermost(model, lambda one: type(one).__module__.startswith(PACKED)):
        yield Reason(
            module=name,
            what=f"{name} is quantized ({type(module).__name__}): its weights are packed and get no gradient.",
            remedy="Train the model before it is quantized, or with torch's fake quantization (QAT).",
        )


def _closed(model: nn.Module, layout: Layout, compute: Compute) -> Iterator[Reason]:
    """Yield what can be copied to every worker, but not be split."""
    rows_are_split = layout.shard > 1 or compute.offload == "all"
    is_rewritten = layout.tensor * layout.context * layout.experts > 1  # forwards see parts of tensors
    words = _axes_text(layout, compute)
    for name, module in _outermost(model, lambda one: isinstance(one, torch.jit.ScriptModule)):
        if rows_are_split or is_rewritten or (layout.stages > 1 and module is model):
            yield Reason(
                module=name,
                what=f"{name} is a {type(module).__name__} (torch.jit), which cannot be taken apart for {words}.",
                remedy="Prepare the module that was scripted or traced; Compute(compile=True) is what makes it faster.",
            )
    for name, module in _outermost(model, _is_compiled):
        if is_rewritten or (layout.stages > 1 and module is model):
            yield Reason(
                module=name,
                what=f"{name} is compiled (torch.compile), and the compiler does not see through {words}.",
                remedy="Prepare the model without torch.compile.",
            )
    for name, parameter in model.named_parameters():
        is_subclass = is_traceable_wrapper_subclass(parameter) and not is_sharded(parameter)
        if is_subclass and (rows_are_split or is_rewritten or layout.stages > 1):
            yield Reason(
                module=name,
                what=f"{name} is a {type(parameter).__name__}, a tensor of a class of its own, whose numbers cannot be "
                f"taken apart for {words}.",
                remedy="Use Layout(replicas=n), or an ordinary parameter.",
            )
    if rows_are_split or layout.tensor * layout.experts * layout.stages > 1:
        yield from kept_views(model, words)


def _outermost(model: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules of a kind that are within no other one of it, with their names."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and is_one(module):
            inside.update(module.modules())
            yield name or "the model", module


def _kinds(module: nn.Module) -> set[str]:
    """Return the names of torch's classes of which a module is an instance."""
    return {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}


def _is_split_already(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return "FSDPModule" in _kinds(module) or any(is_sharded(one) or isinstance(one, PartialParameter) for one in own)


def _is_compiled(module: Any) -> bool:
    """Return whether a module came from `torch.compile(module)`, or `module.compile()` was called."""
    return "OptimizedModule" in _kinds(module) or getattr(module, "_compiled_call_impl", None) is not None


def _axes_text(layout: Layout, compute: Compute) -> str:
    """Return "Layout(shard=2, tensor=2)"."""
    sizes = {name: getattr(layout, name) for name in ("shard", "tensor", "stages", "context", "experts")}
    axes = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    return f"Layout({', '.join(axes)})" if axes else f"Compute(offload={compute.offload!r})"
