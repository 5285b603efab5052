"""Models of transformers that fill a cache for generation while they are trained, which is turned off."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

__all__ = ["had_cache", "is_of_transformers", "turn_caches_off"]

_without_cache: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def turn_caches_off(model: nn.Module) -> bool:
    """Have a model keep no keys and values for generation in its forward; returns whether it did.

    A block that runs again in backward would put its own into the cache a second time. And beside a cache transformers
    does not look for packed sequences in the positions, so tokens would attend to other sequences.
    """
    owners = [one for one in model.modules() if getattr(getattr(one, "config", None), "use_cache", False) is True]
    _without_cache.update(owners)
    configs: list[Any] = [one.config for one in owners]
    for config in configs:
        config.use_cache = False
    return bool(owners)


def had_cache(model: nn.Module) -> bool:
    """Whether `turn_caches_off` has changed this module's configuration: what is published has it as it was."""
    return model in _without_cache


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers, or holds one; that is not imported here."""
    kind: Any = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return kind is not None and any(isinstance(one, kind) for one in model.modules())
