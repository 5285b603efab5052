"""Repeats random numbers of Python and numpy where a block runs again in backward.

torch's checkpoint puts back torch's own generators only. A block that draws from `random` or `numpy.random`, to leave
out a layer for example, would take another way the second time, and its gradients would be those of another forward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["RepeatedDraws"]


class RepeatedDraws:
    """Calls one forward, first and again: each time with the random numbers of the first."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._before: tuple[Any, Any] | None = None  # the first call; None: it drew nothing
        self._is_again = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        now = _states()
        if not self._is_again:
            out = self._forward(*args, **kwargs)
            self._is_again, self._before = True, None if _are_equal(now, _states()) else now
            return out
        if self._before is None:
            return self._forward(*args, **kwargs)
        _put_back(self._before)
        try:
            return self._forward(*args, **kwargs)  # torch leaves it by an exception once it has what it needs
        finally:
            _put_back(now)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=True)


def _are_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (python, (kind, keys, *rest)), (other_python, (other_kind, other_keys, *other_rest)) = one, other
    return python == other_python and (kind, rest) == (other_kind, other_rest) and np.array_equal(keys, other_keys)


def _put_back(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
