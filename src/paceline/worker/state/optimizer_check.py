"""Refuses optimizers whose steps would differ under a plan, because no worker has all that they compute with."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.parallel.check.optimizer_requirements import needs_all_parameters, needs_whole_parameters
from paceline.plan import ParameterServer, Plan
from paceline.worker.state.state_registry import StateRegistry

__all__ = ["require_own_parameters", "require_possible_steps"]


def require_own_parameters(optimizer: Optimizer, registry: StateRegistry) -> None:
    """Raise ValueError for an optimizer that has a name already, or holds parameters of no prepared model."""
    registry.refuse_known_optimizer(optimizer)
    known = registry.parameter_names()
    strangers = sum(id(p) not in known for g in optimizer.param_groups for p in g["params"])
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} holds {strangers} parameters of no prepared model: call model = "
            "worker.prepare(model) first, "
            "and make the optimizer from that model's parameters"
        )


def require_possible_steps(optimizer: Optimizer, registry: StateRegistry, plan: Plan) -> None:
    """Raise PlanError where an optimizer needs whole parameters, or all of them, and this worker has only a part.

    The parts of tensor and expert parallel are plain tensors, so the optimizer cannot see the whole. Fully sharded
    parameters are DTensors: torch gives the optimizer norms and products of the whole.
    """
    names = registry.parameter_names()
    held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    split = next((name for name in held if name in registry.slices), None)
    layout, name = plan.layout, type(optimizer).__name__
    if split is not None and needs_whole_parameters(optimizer):
        axes = " and ".join(axis for axis in ("tensor", "experts") if getattr(layout, axis) > 1)
        raise PlanError(
            f"{name} looks at parameters as a whole (norms, rows and columns, products), but "
            f"under {layout!r} each worker has only a part of {split}, and would take other steps. Use shard or "
            f"stages in place of {axes}, or an optimizer that treats each number by itself, such as AdamW."
        )
    why = _why_not_all(held, split, registry, plan)
    if why is not None and needs_all_parameters(optimizer):
        raise PlanError(
            f"{name}, as it was made here, looks at all its parameters together (their norm, or how far all have "
            f"come), but {why}: each part would take other steps. Use replicas or shard without that, or an "
            "optimizer that looks at one parameter at a time, such as AdamW."
        )


def _why_not_all(held: Sequence[str], split: str | None, registry: StateRegistry, plan: Plan) -> str | None:
    """Why no optimizer's step has all its parameters, which are `held`; None: each step has. `split`: one of which
    this worker has only a part."""
    sync, layout = plan.sync, plan.layout
    if split is not None:
        return f"under {layout!r} each worker has only a part of {split}"
    owners = (registry.owners[name] for name in held if name in registry.owners)
    if any(owner.expert not in (None, 0) for owner in owners):
        return f"under Layout(experts={layout.experts}) each worker has only its own experts"
    if layout.stages > 1:
        return f"under Layout(stages={layout.stages}) each stage has only its own"
    if isinstance(sync, ParameterServer) and sync.servers > 1:
        return f"with ParameterServer(servers={sync.servers}) each server has only its own"
    if plan.compute.offload != "none":
        return f"with Compute(offload={plan.compute.offload!r}) one parameter's state is here at a time"
    return None
