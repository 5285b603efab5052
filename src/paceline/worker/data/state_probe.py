"""Tries once whether a lane's state brings back its samples: a second copy begins from it, and must give the same ones.

Some streams have a state that does not: a shuffle buffer, for example, may be filled anew. A resume would then use
other samples, and nobody would notice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["StateProbe", "differ"]

TRIED = 4  # samples behind the state


class StateProbe:
    """What a lane gave behind a state of it."""

    def __init__(self, epoch: int, count: int, state: Any) -> None:
        self.epoch, self.count, self.state = epoch, count, state
        self.given: list[Any] = []

    def note(self, item: Any) -> bool:
        """Keep one more sample; returns whether there are enough."""
        self.given.append(copy.deepcopy(item))  # what collates it may change it
        return len(self.given) >= TRIED

    def require_same(self, again: list[Any], lane: int) -> None:
        """Raise ValueError where the state gave other samples again."""
        if len(again) == len(self.given) and not any(map(differ, self.given, again)):
            return
        raise ValueError(
            f"the state of lane {lane} after {self.count} samples does not bring back the samples behind it: a resume "
            "would use others. A shuffle buffer is filled anew, for example, or random numbers come from a generator "
            "that the state lacks. Shuffle the order of files in its place, or have lanes read again up to their "
            "position: paceline.ShardedStream(make, shards=..., uses_state=False)"
        )


def differ(one: Any, other: Any) -> bool:
    """Whether two samples have different values; what cannot be compared is taken to be the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return differ(one.detach().cpu().double().numpy(), other.detach().cpu().double().numpy())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or one.dtype.kind not in "biufSU" or other.dtype.kind not in "biufSU":
            return one.shape != other.shape
        return bool(((one != other) & ((one == one) | (other == other))).any())  # not a number is like itself
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() != other.keys() or any(differ(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(map(differ, one, other))
    if isinstance(one, (int, float, str, bytes)) and isinstance(other, (int, float, str, bytes)):
        return one != other and not (one != one and other != other)
    return type(one) is not type(other)
