"""Distribute a model's routed experts over workers, in place; the model stays the user's own object, and routes as
before.

Each worker keeps its experts. The module's own forward runs on a *stand-in*: a copy that has only the local experts,
numbered from 0. The code around it sees a module that looks and answers as before, for all experts.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.expert.find_experts import RoutedExperts
from paceline.parallel.expert.token_dispatch import ExpertCollectives, dispatch_tokens, route_of
from paceline.parallel.expert.verify import verify_separable
from paceline.parallel.file_weights import WeightFiles
from paceline.parallel.meta.meta_device import absent
from paceline.parallel.partial_parameter import HeldPart, PartialParameter, mark_partial, on_parts, whole_shape
from paceline.parallel.stand_in_weights import stand_in_weights
from paceline.parallel.tensor.plan import ParameterSplit
from paceline.parallel.tensor.split_tensor import whole
from paceline.units import bytes_text

__all__ = ["ExpertParallelModel", "distribute_experts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallelModel:
    """What the training loop must know of an expert parallel model.

    Gradients of experts' parameters hold what the tokens of all workers of the group contribute. Gradients of all other
    parameters hold only what this worker's tokens contribute.
    """

    splits: dict[str, ParameterSplit]  # stacked parameters, of which each worker has some rows
    owners: dict[str, int]  # parameters of experts in lists, each on one worker
    headline: str

    def is_of_experts(self, name: str) -> bool:
        return name in self.splits or name in self.owners


def distribute_experts(
    model: nn.Module, found: Sequence[RoutedExperts], group: ExpertCollectives
) -> ExpertParallelModel:
    """Change `model` in place; all workers of `group` must call it, with equal weights.

    Parameters that stay here are the same objects, stacked ones with smaller data. Those of other workers' experts are
    replaced by parameters on the meta device. So make optimizers afterwards.
    """
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    splits: dict[str, ParameterSplit] = {}
    owners: dict[str, int] = {}
    blocks = tuple(one.name for one in found)
    with stand_in_weights(model):
        untried = [one.name for one in found if not _is_tried(one, group.size)]
    stacked = [getattr(one.module, key) for one in found for key in one.stacked]
    files = WeightFiles(stacked)
    files.coming(one.detach().chunk(group.size)[group.index] for one in stacked)  # as they are split below
    for number, one in enumerate(found):
        each = one.count // group.size
        for key in one.stacked:
            parameter = getattr(one.module, key)
            name = f"{one.name}.{key}" if one.name else key
            split = ParameterSplit(
                name=name, shape=tuple(parameter.shape), dim=0, sections=(one.count,), size=group.size
            )
            splits[name] = split
            parameter.grad = None
            part = split.part(parameter.detach(), group.index)
            parameter.data = part.clone(memory_format=torch.contiguous_format)
            files.was_read(part)
            because = f"Layout(experts={group.size}) spreads the experts"
            ranges = split.ranges(group.index)
            mark_partial(parameter, HeldPart(name=name, whole=split.shape, dim=0, because=because, ranges=ranges))
        for name, members in one.members():
            for place, member in enumerate(members):
                owners.update((f"{name}.{place}.{key}", place // each) for key, _ in member.named_parameters())
                if place // each != group.index:
                    _free(member, f"{name}.{place}", f"Layout(experts={group.size}) put this expert elsewhere")
        _install(one, number, blocks, group)
    files.release()
    distributed = ExpertParallelModel(splits=splits, owners=owners, headline="")
    of_experts = sum(size for name, size in sizes.items() if distributed.is_of_experts(name))
    here = sum(sizes.values()) - of_experts + of_experts // group.size
    counts = " and ".join(str(count) for count in sorted({one.count for one in found}))
    blocks_text = f"{len(found)} routed block{'s' if len(found) > 1 else ''} ({counts} experts)"
    headline = (
        f"experts={group.size}: {blocks_text} {'are' if len(found) > 1 else 'is'} distributed; {bytes_text(here)} of "
        f"{bytes_text(sum(sizes.values()))} of parameters on each worker"
    )
    if untried:
        headline += f"; {', '.join(untried)}: whether their experts depend on each other could not be tried"
    return dataclasses.replace(distributed, headline=headline)


def _is_tried(one: RoutedExperts, size: int) -> bool:
    def stand_in_for(worker: int) -> Any:
        return _stand_in(one.module, one, index=worker, size=size, is_whole=True)

    return verify_separable(one, _forward_of(one), stand_in_for, size=size)


def _free(member: nn.Module, name: str, because: str) -> None:
    """Free the parameters of another worker's expert."""
    for inner, module in member.named_modules(prefix=name):
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, absent(parameter))
            held = HeldPart(name=f"{inner}.{key}", whole=whole_shape(parameter), dim=None, because=because)
            mark_partial(parameter, held)
            mark_partial(getattr(module, key), held)


def _install(one: RoutedExperts, number: int, blocks: Sequence[str], group: ExpertCollectives) -> None:
    """Replace the module's forward by one that sends tokens to the workers that have their experts."""
    function = _forward_of(one)
    signature, here_count = inspect.signature(one.module.forward), one.count // group.size

    @functools.wraps(function)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        tokens, index, weights = map(whole, signature.bind(*args, **kwargs).arguments.values())
        _check(one.name, tokens, index, weights)
        here = _stand_in(module, one, index=group.index, size=group.size)
        flat, index = tokens.reshape(-1, tokens.shape[-1]), index.reshape(-1, index.shape[-1])
        weights = weights.reshape(index.shape)
        of_experts = any(parameter.requires_grad for parameter in module.parameters())
        is_followed = torch.is_grad_enabled() and (of_experts or tokens.requires_grad or weights.requires_grad)
        if group.is_still:
            return function(here, flat, index % here_count, weights).reshape(*tokens.shape[:-1], -1)
        route = route_of(index, num_experts=one.count, group=group, block=number, blocks=blocks)

        def apply(rows: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
            made = function(here, rows, experts, shares)
            if not isinstance(made, Tensor) or made.shape[:1] != rows.shape[:1]:
                raise PlanError(
                    f"{one.name} gave {_kind(made)} for {rows.shape[0]} tokens, but experts return one row for each: "
                    "the sum of what the token's experts make of it. Return other values from the module around it."
                )
            return made

        made = dispatch_tokens(apply, flat, weights, route=route, group=group, is_followed=is_followed)
        # Not a view: an in-place addition by the caller would overwrite what backward of sharded rows still needs.
        return made if tokens.ndim == 2 else made.reshape(*tokens.shape[:-1], *made.shape[1:]).clone()

    one.module.forward = types.MethodType(run, one.module)


def _forward_of(one: RoutedExperts) -> Callable[..., Tensor]:
    """Return the module's forward, as a function of the module."""
    forward: Any = one.module.forward
    if not isinstance(forward, types.MethodType) or forward.__self__ is not one.module:
        raise PlanError(
            f"{one.name} has a forward of its own that is no method of {type(one.module).__name__}, so it cannot be "
            "run for some of the experts: give it its class's forward."
        )
    return forward.__func__


def _stand_in(module: nn.Module, one: RoutedExperts, *, index: int, size: int, is_whole: bool = False) -> Any:
    """Return the module as if the experts of worker `index` were all.

    Its parameters are the same objects; for a module that is still whole, they are rows of them.
    """
    each = one.count // size
    mine = slice(index * each, (index + 1) * each)
    here: Any = copy.copy(module)
    children = dict(module.named_children()) if one.lists != ("",) else {}
    for key in one.lists:
        members: Any = module.get_submodule(key)
        if key:
            children[key] = nn.ModuleList(list(members)[mine])
        else:
            children |= {str(place): member for place, member in enumerate(list(members)[mine])}
    here.__dict__["_modules"] = children
    if is_whole:
        rows = {key: nn.Parameter(getattr(module, key).detach()[mine], requires_grad=False) for key in one.stacked}
        here.__dict__["_parameters"] = {**dict(module.named_parameters(recurse=False)), **rows}
    for key in one.stacked:  # the module's own code may do anything with its experts
        parameter = getattr(module, key)
        if isinstance(parameter, PartialParameter):
            with on_parts():
                here.__dict__[key] = parameter.view_as(parameter)
    if "num_experts" in vars(module):
        here.__dict__["num_experts"] = each
    return here


def _check(name: str, tokens: Tensor, index: Tensor, weights: Tensor) -> None:
    if tokens.ndim < 2 or index.shape[:-1] != tokens.shape[:-1] or weights.shape != index.shape:
        raise PlanError(
            f"{name} was called with tokens {tuple(tokens.shape)}, index {tuple(index.shape)}, weights "
            f"{tuple(weights.shape)}: it takes tokens (n, width), and for each the numbers of its k experts and their "
            "weights, both (n, k)."
        )


def _kind(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
