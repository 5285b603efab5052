"""Make a model work on slices of its sequence, in place, as a plan says; the model stays the user's own object.

Tokens are sliced as early as possible: an embedding looks up its worker's tokens only. Where blocks get whole tensors
nonetheless (patches of an image, for example), a hook slices them before the block. From there on tensors are slices
that show the shape of the whole, until the loss, whose sums are added up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from paceline.errors import PlanError
from paceline.parallel.context.collectives import ContextCollectives
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.op_rules import rule_of
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.tensor.dry_run import gather_inputs
from paceline.parallel.tensor.split_tensor import SplitTensor, TensorGroupOps, mapped, on_parts, split_tensors_in, whole
from paceline.parallel.tensor.tensor_context_ops import TensorContextOps

__all__ = ["ContextModel", "apply_plan", "install"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContextModel:
    """What the training loop must know of a context parallel model.

    All workers of the group run the same whole micro-batches, with their random generators in the same state, and get
    the same loss. The *mean* over the group of a parameter's gradient is the gradient of the loss, for any parameter:
    scale the loss by 1 / size, and sum over all workers of all replicas.
    """

    ops: ContextGroupOps
    plan: ContextPlan

    def whole(self, value: Any) -> Any:
        """Return outputs with all tokens, on every worker; all workers must call it."""
        return self.ops.gathered_tree(value)


def apply_plan(
    model: nn.Module,
    plan: ContextPlan,
    group: ContextCollectives,
    *,
    tensor_parallel_group: TensorGroupOps | None = None,
) -> ContextModel:
    """Change `model` in place; all workers of `group` must call it, with equal weights and the same plan.

    `tensor_parallel_group`: the operations of the group that has split its layers before. All workers of one context
    group must have the same index in their tensor parallel groups.

    With gradients, outputs stay slices that show the shape of the whole, so the loss is computed on slices, too. An
    operation that needs all tokens gathers them, on all workers. Without gradients outputs are whole.
    """
    if group.size != plan.size:
        raise PlanError(
            f"the plan is for {plan.size} workers, but the group has {group.size}; make it for {group.size}."
        )
    ops = ContextGroupOps(group, rules=rule_of, kind=plan.kind)
    if tensor_parallel_group is not None:
        TensorContextOps(tensor_parallel_group, ops)
    install(model, plan, ops)

    def whole_outputs(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            return output
        return mapped(output, lambda one: whole(one) if isinstance(one, SplitTensor) else one)

    model.register_forward_hook(whole_outputs)
    return ContextModel(ops=ops, plan=plan)


def install(model: nn.Module, plan: ContextPlan, ops: ContextGroupOps) -> list[RemovableHandle]:
    """Install the forwards and hooks of the modules that the plan names; returns the hooks."""
    modules = dict(model.named_modules())
    missing = [
        name for name in (*plan.embeddings, *plan.blocks, *plan.tokenwise, *plan.gathered) if name not in modules
    ]
    if missing:
        raise PlanError(f"the plan names {missing[0]}, which {type(model).__name__} does not have; make it anew.")
    for name in plan.embeddings:
        is_plain = type(modules[name]).forward is nn.Embedding.forward
        _wrap(modules[name], functools.partial(_look_up, ops, plan.dim, name, is_plain))
    for name in plan.tokenwise:
        _wrap(modules[name], functools.partial(_token_by_token, ops, name))
    hooks = [gather_inputs(modules[name]) for name in plan.gathered]
    for name in plan.blocks:
        hook = functools.partial(_slice_input, ops, plan.dim, name)
        hooks.append(modules[name].register_forward_pre_hook(hook, with_kwargs=True))
    return hooks


def _wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make `around(forward, *args)` the module's forward, as a method: `copy.deepcopy` binds it to the copy."""
    before: Any = module.forward
    is_method = isinstance(before, types.MethodType) and before.__self__ is module
    function = before.__func__ if is_method else None

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = before if function is None else functools.partial(function, module)
        return around(forward, *args, **kwargs)

    module.forward = types.MethodType(run, module)


def _look_up(
    ops: ContextGroupOps,
    dim: int,
    name: str,
    is_plain: bool,
    forward: Callable[..., Any],
    tokens: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Look up this worker's tokens only. An embedding class with its own forward may count tokens, so it gets all of
    them."""
    place = tokens.ndim + 1 + dim
    if isinstance(tokens, SplitTensor) or place < 0 or tokens.shape[place] < ops.size:
        return forward(tokens, *args, **kwargs)
    if not is_plain:
        return mapped(forward(tokens, *args, **kwargs), lambda one: ops.sliced(one, dim=dim, site=name))
    sections = (tokens.shape[place],)
    out = forward(ops.scatter(tokens, dim=place, sections=sections), *args, **kwargs)
    return ops.as_split(out, dim=place, sections=sections, site=name)


def _slice_input(
    ops: ContextGroupOps, dim: int, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Slice the first tensor among a block's arguments, if it is whole."""

    def slice_whole(one: Tensor) -> Tensor:
        is_hidden = not isinstance(one, SplitTensor) and one.is_floating_point() and one.ndim >= -dim
        return sliced(one, ops, dim, name) if is_hidden else one

    place = next((number for number, one in enumerate(args) if isinstance(one, Tensor)), None)
    if place is not None:
        return (*args[:place], slice_whole(args[place]), *args[place + 1 :]), kwargs
    key = next((key for key, one in kwargs.items() if isinstance(one, Tensor)), None)
    return (args, kwargs) if key is None else (args, {**kwargs, key: slice_whole(kwargs[key])})


def sliced(tensor: Tensor, ops: ContextGroupOps, dim: int, site: str) -> Tensor:
    """Return this worker's slice of a whole tensor. It is a torch function, so that torch function modes see it."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(sliced, (tensor,), tensor, ops, dim, site)
    return ops.sliced(tensor, dim=dim, site=site)


def _token_by_token(ops: ContextGroupOps, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module that works on each token by itself on this worker's tokens, as plain tensors."""
    lead = next(split_tensors_in((args, kwargs)), None)
    if lead is None:
        return forward(*args, **kwargs)

    def plain(value: Any) -> Any:
        return value.view_as(value) if isinstance(value, SplitTensor) else value

    with on_parts():
        args, kwargs = mapped(args, plain), mapped(kwargs, plain)
        shape = lead.shape
    with ops.own_randomness(lead.device):
        out = forward(*args, **kwargs)
    return mapped(out, lambda one: _as_slice(one, lead, shape, name) if isinstance(one, Tensor) else one)


def _as_slice(out: Tensor, lead: SplitTensor, shape: Sequence[int], name: str) -> Tensor:
    """Make results for each token slices as the input was, in its dims, or with samples and tokens merged into one
    dim.
    """
    ops: Any = lead.ops
    dim = lead.split_dim
    if out.ndim > dim and tuple(out.shape[: dim + 1]) == tuple(shape[: dim + 1]):
        return ops.as_split(out.view_as(out), dim=dim, sections=lead.sections, site=name)
    if out.ndim and out.shape[0] == math.prod(shape[: dim + 1]):
        return ops.as_split(out.view_as(out), dim=0, sections=lead.sections * math.prod(shape[:dim]), site=name)
    raise PlanError(
        f"{name} returns a tensor of shape {tuple(out.shape)} for tokens of shape {tuple(shape)}, so it does not work "
        "token by token. Take it out of tokenwise=."
    )
