"""Calls that a trace sees as a whole: attention, and regions that the model itself computes again in backward; and one
that it answers, whether a tensor has numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

from paceline.parallel.torch_functions import CHECKPOINT_FUNCTION, CHECKPOINT_GENERATOR

__all__ = ["attention_seen", "numbers_told", "recompute_seen"]


@contextlib.contextmanager
def attention_seen(seen: Callable[[Callable[[], Tensor], Tensor, Tensor, Tensor, bool], Tensor]) -> Iterator[None]:
    """Within it, scaled_dot_product_attention is `seen(call, query, key, value, causal)`, also where torch's own
    modules call it.
    """
    former = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        causal = bool(args[2] if len(args) > 2 else kwargs.get("is_causal", False))
        return seen(lambda: former(query, key, value, *args, **kwargs), query, key, value, causal)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = former


@contextlib.contextmanager
def recompute_seen(region: Callable[[Any], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it, what torch.utils.checkpoint would compute again runs within `region(given)`, and like any other code.

    Both kinds are caught behind `checkpoint`, which modules have imported under names of their own. A policy of
    selective recompute (`context_fn`) is not asked: the whole region counts as computed again.
    """
    module: Any = torch.utils.checkpoint
    names = (CHECKPOINT_FUNCTION, CHECKPOINT_GENERATOR)
    former = {name: getattr(module, name) for name in names}

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            with region(args):
                return function(*args)

    def other(function: Callable[..., Any], *options: Any, **given: Any) -> Iterator[None]:
        with region((options, given)):
            yield

    try:
        setattr(module, CHECKPOINT_FUNCTION, Reentrant)
        setattr(module, CHECKPOINT_GENERATOR, other)
        yield
    finally:
        for name in names:
            setattr(module, name, former[name])


@contextlib.contextmanager
def numbers_told(knows: Callable[[Any], bool]) -> Iterator[None]:
    """Within it, transformers takes a fake tensor whose numbers are known for a real one.

    It asks before it looks at masks and positions. For a fake tensor it would write out a mask that a real run leaves
    out, and attention would cost twice as much.
    """
    name = "is_fake_tensor"
    module: Any = sys.modules.get("transformers.utils.import_utils")
    former: Any = getattr(module, name, None)
    if former is None:
        yield
        return
    setattr(module, name, lambda one: former(one) and not knows(one))
    try:
        yield
    finally:
        setattr(module, name, former)
