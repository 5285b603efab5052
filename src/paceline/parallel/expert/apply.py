"""Spread a model's routed experts over workers, in place: the model stays the user's own object, and routes as before.

Each worker keeps its experts, whose own forward does their work: on a stand-in of the module, which has as many experts
as are here, numbered from 0. What is around them sees a module that looks and answers as it did, for all experts.
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
from paceline.parallel.expert.verify import prove_separable
from paceline.parallel.meta.meta_device import absent
from paceline.parallel.tensor.plan import ParameterCut
from paceline.parallel.tensor.split_tensor import whole
from paceline.units import bytes_text

__all__ = ["ExpertParallelModel", "distribute_experts"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallelModel:
    """What the owner of the training loop must know of a model whose experts are spread.

    Gradients of what belongs to experts hold what all workers of the group add to them; of all else each worker has
    what its own tokens add.
    """

    cuts: dict[str, ParameterCut]  # stacked parameters, of which each worker has some rows
    owners: dict[str, int]  # parameters of experts in lists, which one worker has each
    headline: str

    def is_of_experts(self, name: str) -> bool:
        return name in self.cuts or name in self.owners


def distribute_experts(
    model: nn.Module, found: Sequence[RoutedExperts], group: ExpertCollectives
) -> ExpertParallelModel:
    """Change `model` in place; all workers of `group` must call it, with equal weights.

    Parameters that are here stay the same objects, stacked ones with smaller data; those of other workers' experts are
    replaced by ones on the meta device. So make optimizers afterwards.
    """
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    cuts: dict[str, ParameterCut] = {}
    owners: dict[str, int] = {}
    blocks = tuple(one.name for one in found)
    untried = [one.name for one in found if not _is_tried(one, group.size)]
    for number, one in enumerate(found):
        each = one.count // group.size
        for key in one.stacked:
            parameter = getattr(one.module, key)
            name = f"{one.name}.{key}" if one.name else key
            cut = ParameterCut(name=name, shape=tuple(parameter.shape), dim=0, sections=(one.count,), size=group.size)
            cuts[name] = cut
            parameter.grad = None
            parameter.data = cut.part(parameter.detach(), group.index).clone(memory_format=torch.contiguous_format)
        for name, members in one.members():
            for place, member in enumerate(members):
                owners.update((f"{name}.{place}.{key}", place // each) for key, _ in member.named_parameters())
                if place // each != group.index:
                    _leave(member)
        _install(one, number, blocks, group)
    spread = ExpertParallelModel(cuts=cuts, owners=owners, headline="")
    of_experts = sum(size for name, size in sizes.items() if spread.is_of_experts(name))
    here = sum(sizes.values()) - of_experts + of_experts // group.size
    counts = " and ".join(str(count) for count in sorted({one.count for one in found}))
    blocks_text = f"{len(found)} routed block{'s' if len(found) > 1 else ''} ({counts} experts)"
    headline = (
        f"experts={group.size}: {blocks_text} {'are' if len(found) > 1 else 'is'} spread; {bytes_text(here)} of "
        f"{bytes_text(sum(sizes.values()))} of parameters on each worker"
    )
    if untried:
        headline += f"; {', '.join(untried)}: whether their experts depend on each other could not be tried"
    return dataclasses.replace(spread, headline=headline)


def _is_tried(one: RoutedExperts, size: int) -> bool:
    def standing_in(worker: int) -> Any:
        return _stand_in(one.module, one, index=worker, size=size, is_whole=True)

    return prove_separable(one, _forward_of(one), standing_in, size=size)


def _leave(member: nn.Module) -> None:
    """Free what another worker has."""
    for module in member.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, absent(parameter))


def _install(one: RoutedExperts, number: int, blocks: Sequence[str], group: ExpertCollectives) -> None:
    """Let tokens go to whoever has their experts, in place of the module's own forward, which does what is here."""
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
        # Not a view: where rows are split, too, whoever adds to one in place would wipe out what backward waits for.
        return made if tokens.ndim == 2 else made.reshape(*tokens.shape[:-1], *made.shape[1:]).clone()

    one.module.forward = types.MethodType(run, one.module)


def _forward_of(one: RoutedExperts) -> Callable[..., Tensor]:
    """The module's forward, as a function of the module."""
    forward: Any = one.module.forward
    if not isinstance(forward, types.MethodType) or forward.__self__ is not one.module:
        raise PlanError(
            f"{one.name} has a forward of its own that is no method of {type(one.module).__name__}, so it cannot be "
            "run for some of the experts: give it its class's forward."
        )
    return forward.__func__


def _stand_in(module: nn.Module, one: RoutedExperts, *, index: int, size: int, is_whole: bool = False) -> Any:
    """The module as it would be if the experts of worker `index` were all; its parameters are the same, or, of a module
    that is still whole, rows of them."""
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
