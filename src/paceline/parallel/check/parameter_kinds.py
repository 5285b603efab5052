"""The kinds of parameters that an optimizer treats apart: those of a trial are one of each."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["kinds_of", "members_of_kinds"]


def kinds_of(optimizer: Optimizer, parameters: Collection[Tensor] | None = None) -> list[tuple[int, int]]:
    """Return the kinds: the number of a group, and how many dims the parameters have.

    Groups count as one where their options are equal, but for rates and how strong a decay is. `parameters`: of which
    the kinds are wanted; None: of all.
    """
    return list(members_of_kinds(optimizer, parameters))


def members_of_kinds(
    optimizer: Optimizer, parameters: Collection[Tensor] | None = None
) -> dict[tuple[int, int], list[Tensor]]:
    """Return the parameters of each kind."""
    wanted = None if parameters is None else {id(one) for one in parameters}
    found: dict[tuple[str, int], tuple[int, list[Tensor]]] = {}
    for number, options in enumerate(optimizer.param_groups):
        told = {key: value for key, value in options.items() if key not in ("params", "param_names", "name")}
        told.update({key: bool(told[key]) for key in ("lr", "initial_lr", "weight_decay") if key in told})
        for one in options["params"]:
            if (wanted is None or id(one) in wanted) and one.dim():  # a single number is whole anywhere
                key = (repr(sorted(told.items(), key=lambda item: item[0])), one.dim())
                found.setdefault(key, (number, []))[1].append(one)
    return {(number, dim): members for (_, dim), (number, members) in found.items()}
