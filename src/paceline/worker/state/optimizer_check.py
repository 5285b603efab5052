"""Refuses optimizers whose steps would differ under a plan, because no worker has all that they compute with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.state_tree import freeze
from paceline.comm.sharded_tensors import is_sharded
from paceline.errors import PlanError
from paceline.parallel.check.optimizer_requirements import (
    BY_NUMBER,
    cannot_be_tried,
    draws_random_numbers,
    needs_all_parameters,
    parameters_needed_whole,
)
from paceline.parallel.check.optimizer_state import kept_state
from paceline.parallel.check.sharded_steps import why_not_sharded
from paceline.parallel.owner_steps.stand_ins import why_not_by_owners
from paceline.plan import ParameterServer, Plan
from paceline.worker.state.state_registry import StateRegistry

__all__ = ["choices_of", "require_own_parameters", "require_possible_steps", "require_storable_state"]


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


def require_possible_steps(optimizer: Optimizer, registry: StateRegistry, plan: Plan) -> list[Tensor]:
    """Return those parameters of which workers have parts while the optimizer needs the whole: owners step them.

    Raises PlanError where an optimizer needs more than one parameter at a time, and no worker has it. It may be that
    fully sharded parameters, which are DTensors, still give it that: torch computes norms and products of the whole.
    """
    if type(optimizer) in BY_NUMBER:
        return []
    names = registry.parameter_names()
    held = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    cut = {name: p for name, p in held.items() if name in registry.slices}
    layout, name = plan.layout, type(optimizer).__name__
    apart = _why_apart(list(held), next(iter(cut), None), registry, plan)
    why, needs_all = apart or _why_one_by_one(plan), needs_all_parameters(optimizer)
    if why is not None and needs_all:
        raise PlanError(
            f"{name}, as it was made here, looks at all its parameters together (their norm, or how far all have "
            f"come), but {why}: each part would take other steps. Use replicas or shard without that, or an "
            "optimizer that looks at one parameter at a time, such as AdamW."
        )
    if apart is not None and draws_random_numbers(optimizer):
        raise PlanError(
            f"{name} draws random numbers in its step, one parameter after the other, but {apart}, and so each would "
            "draw others than one process does. Use replicas without that, or add the noise to gradients in a hook "
            "(parameter.register_hook), drawn from a generator of each parameter's own."
        )
    if layout.shard > 1 and isinstance(optimizer, torch.optim.LBFGS):
        raise PlanError(
            f"{name} computes with all its parameters as one vector, but under {layout!r} each worker has rows of "
            "them. Use replicas in place of shard, or an optimizer that takes one parameter at a time, such as AdamW."
        )
    whole, problem = _for_owners(optimizer, [p for n, p in held.items() if n in cut or is_sharded(p)], needs_all, plan)
    if problem and cut:
        raise PlanError(
            f"{name} looks at parameters as a whole (norms, rows and columns, products), but under {layout!r} each "
            f"worker has only a part of {next(iter(cut))}, and no worker can step the whole for all: {problem}. Use "
            "shard or stages in place of tensor and experts, or an optimizer that treats each number by itself, such "
            "as AdamW."
        )
    if layout.shard > 1 and (why := why_not_sharded(optimizer, apart_from=whole)) is not None:
        said = f", and no worker can step whole ones for all ({problem})" if problem else ""
        raise PlanError(
            f"{name} was tried on sharded parameters, but {why}{said}. Under {layout!r} use an optimizer that treats "
            "each number by itself, such as AdamW, or replicas, stages or tensor in place of shard."
        )
    return whole


def _for_owners(optimizer: Optimizer, split: Sequence[Tensor], needs_all: bool, plan: Plan) -> tuple[list[Tensor], str]:
    """Return the parameters, of those that are split, that owners have to step; or why they cannot, and none."""
    whole = parameters_needed_whole(optimizer, split) if split else []
    if not whole:
        return [], ""
    if needs_all:
        return [], "it looks at all parameters together"
    if cannot_be_tried(optimizer, whole):
        return [], "its step cannot be tried on small tensors"
    if plan.compute.offload != "none":
        return [], f"Compute(offload={plan.compute.offload!r}) steps what is here, one parameter at a time"
    if draws_random_numbers(optimizer):
        return [], "it draws random numbers, one parameter after the other"
    if (why := why_not_by_owners(optimizer, whole)) is not None:
        return [], why
    return whole, ""


def choices_of(optimizer: Optimizer) -> tuple[object, ...]:
    """What of an optimizer's options decides which steps it takes: switches and names, by group."""
    return tuple(
        (len(group["params"]), *((key, one) for key, one in group.items() if isinstance(one, (bool, str, type(None)))))
        for group in optimizer.param_groups
    )


def require_storable_state(
    optimizer: Optimizer, registry: StateRegistry, plan: Plan, whole: Sequence[Tensor] = ()
) -> str | None:
    """Raise PlanError where what an optimizer keeps cannot be in a checkpoint; returns what is to be warned of.

    `whole`: parameters whose state is whole, on their owners.

    torch's own optimizers keep tensors in the shapes of parameters, single numbers and plain values.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch" and not _has_odd_groups(optimizer):
        return None
    kept, name = kept_state(optimizer, freeze), type(optimizer).__name__
    instead = "Use an optimizer whose state has its parameters' shapes, such as AdamW or SGD"
    if kept.refused:
        raise PlanError(
            f"{name} keeps what no checkpoint can hold, so no save of this run could succeed: {kept.refused}. "
            "A checkpoint holds tensors of each parameter, and dict, list, tuple, str, int, float, bool, bytes and "
            f"None. {instead}."
        )
    names = registry.parameter_names()
    held, owned = [p for group in optimizer.param_groups for p in group["params"]], {id(p) for p in whole}
    split = [names[id(p)] for p in held if names[id(p)] in registry.slices and id(p) not in owned]
    if kept.odd_tensors and split:
        raise PlanError(
            f"{name} keeps {kept.odd_tensors[0]}, but under {plan.layout!r} each worker has only a part of {split[0]}, "
            f"and a checkpoint can put together only what has its shape. {instead}, or layouts without tensor and "
            "experts."
        )
    if not kept.is_incomplete:
        return None
    if plan.compute.state != "fp32":
        raise PlanError(
            f"{name} keeps a part of what it remembers outside of its state (in attributes, or in another optimizer "
            f"in it), but Compute(state={plan.compute.state!r}) steps some parameters after others, and it could not "
            f"tell these from steps. Use state='fp32'. {instead}."
        )
    if plan.layout.is_elastic:
        raise PlanError(
            f"{name} keeps a part of what it remembers outside of its state (in attributes, or in another optimizer "
            f"in it), but under {plan.layout!r} newcomers are sent the state, and would take other steps. {instead}."
        )
    return (
        f"{name} keeps a part of what it remembers outside of its state (in attributes, or in another optimizer in "
        "it), so checkpoints do not hold it: a resumed run takes other steps than one that was not interrupted"
    )


def _has_odd_groups(optimizer: Optimizer) -> bool:
    """Whether an optimizer has options or state of another kind than those that torch's optimizers begin with."""
    plain = (str, int, float, bool, type(None), tuple, list, Tensor, torch.device)
    options = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return not all(isinstance(value, plain) for value in options)


def _why_apart(held: Sequence[str], split: str | None, registry: StateRegistry, plan: Plan) -> str | None:
    """Why the parameters that an optimizer has, `held`, are at several places; None: they are together. `split`: one of
    which this worker has only a part."""
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
    return None


def _why_one_by_one(plan: Plan) -> str | None:
    """Why a step sees one parameter after the other; None: it sees all at once."""
    if plan.compute.state != "fp32":
        return f"with Compute(state={plan.compute.state!r}) the state of some is rounded before others step"
    if plan.compute.offload == "none":
        return None
    return f"with Compute(offload={plan.compute.offload!r}) one parameter's state is here at a time"
