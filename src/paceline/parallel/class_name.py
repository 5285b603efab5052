"""The name of a module's class as its author knows it: torch gives modules that it shards a class of its own."""

from __future__ import annotations

from torch import nn

__all__ = ["class_name", "own_class"]

SHARDED = "FSDPModule"  # the base that `fully_shard` puts before the class of the user


def class_name(module: nn.Module) -> str:
    """Return the name of the class that the user's code has, not that of the subclass that torch makes of it."""
    return own_class(module).__name__


def own_class(module: nn.Module) -> type:
    """Return that class."""
    kind: type = type(module)
    while SHARDED in (names := [base.__name__ for base in kind.__bases__]) and len(names) > 1:
        kind = next(base for base in kind.__bases__ if base.__name__ != SHARDED)
    return kind
