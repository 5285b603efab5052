"""Leaves what a loss keeps as it was while its forward is recorded for pipeline stages.

A recording runs the forward and its loss once more, on tensors without contents. So what a loss keeps (a center of
outputs, a running mean) is put back. What it would keep is made by the model, and most stages never have it: a loss
that keeps such a tensor is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from paceline.errors import PlanError, Reason
from paceline.worker.step.kept_state import Keeper
from paceline.worker.step.plain_state import Scan, changed_places
from paceline.worker.step.state_holders import holders_of_functions, places_of

__all__ = ["left_as_it_was"]


@contextlib.contextmanager
def left_as_it_was(loss_of: Callable[[Any], Any], model: nn.Module) -> Iterator[None]:
    """Put back what `loss_of` keeps outside of the model. Raises PlanError if it keeps a tensor that the model made."""
    holders = holders_of_functions([loss_of], dict.fromkeys(model.modules(), ""))
    before, keeper = Scan(holders), Keeper(copies=False)
    kept = [(one, keeper.keep(one.get())) for one in places_of(holders)]
    made: list[str] = []
    try:
        yield
        made = [one.label for one in changed_places(before, Scan(holders)) if _is_without_contents(one.get())]
    finally:
        for one, restore in kept:
            one.set(restore())
    if made:
        what = (
            f"{made[0]} is no parameter or buffer of a prepared model, but the loss keeps a tensor in it that the "
            "model made. Under Layout(stages=...) other stages do not have it, and would go on with another."
        )
        remedy = (
            "Keep numbers by worker.report(...), or in a buffer that the model's own forward writes; or use "
            "Layout(shard=n) in place of stages."
        )
        raise PlanError(f"{what} {remedy}", reasons=[Reason(module=made[0], what=what, remedy=remedy)])


def _is_without_contents(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_meta or type(value) not in (Tensor, nn.Parameter))
