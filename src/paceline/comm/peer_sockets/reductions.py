"""How the numbers of all members become one: in the order of the members, so all have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["operation_of", "reduced"]

Op = dist.ReduceOp
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SUM": lambda into, one: into.add_(one),
    "AVG": lambda into, one: into.add_(one),
    "PRODUCT": lambda into, one: into.mul_(one),
    "MIN": lambda into, one: torch.minimum(into, one, out=into),
    "MAX": lambda into, one: torch.maximum(into, one, out=into),
    "BAND": lambda into, one: into.bitwise_and_(one),
    "BOR": lambda into, one: into.bitwise_or_(one),
    "BXOR": lambda into, one: into.bitwise_xor_(one),
}
NAMES = {
    Op.SUM: "SUM",
    Op.AVG: "AVG",
    Op.PRODUCT: "PRODUCT",
    Op.MIN: "MIN",
    Op.MAX: "MAX",
    Op.BAND: "BAND",
    Op.BOR: "BOR",
    Op.BXOR: "BXOR",
}


def operation_of(opts: Any) -> str:
    """Return the name of the reduction that torch asks for; NotImplementedError for one that is not here."""
    wanted = Op.SUM if opts is None else opts.reduceOp
    for op, name in NAMES.items():
        if wanted == op:
            return name
    raise NotImplementedError(f"this back end reduces by {', '.join(NAMES.values())}, not by {wanted}")


def reduced(rows: Sequence[Tensor], name: str) -> Tensor:
    """Return the reduction of the members' numbers, in the first row."""
    first, *others = rows
    for row in others:
        REDUCTIONS[name](first, row)
    if name == "AVG":
        first.div_(len(rows)) if first.is_floating_point() or first.is_complex() else first.floor_divide_(len(rows))
    return first
