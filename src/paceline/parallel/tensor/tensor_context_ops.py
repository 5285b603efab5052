"""Tensor and context parallelism together: tensors that are split twice, and which rules a torch function follows.

A rule knows one split, so a function runs by two rules, one within the other. The rule for features comes first; to it,
tokens look whole. Whenever it calls a function itself, the rule for tokens runs that. To this second rule a part of the
features is an ordinary tensor, and sizes are those in memory: the exchange of heads and tokens in attention takes a
worker's own heads for all there are. Collectives of the tensor parallel group do not look at tokens and leave their
split as it is.

    split along          in user's code           in features' rules and layers     in tokens' rules
    both                 SplitTensor (features)   SplitTensor (features)            SplitTensor (tokens)
    features             SplitTensor (features)   SplitTensor (features)            Tensor
    tokens               SplitTensor (tokens)     TokenSplitTensor                  SplitTensor (tokens)

A tensor that is split twice has the split of its features as its own, and that of its tokens `under` it. It stays the
same object, and so in one place of autograd's graph; only its class and its attributes change for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.parallel.tensor.split_tensor import (
    SplitSpec,
    SplitTensor,
    TensorGroupOps,
    TokenSplitTensor,
    on_parts,
    tensors_in,
)

__all__ = ["TensorContextOps"]

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class TensorContextOps:
    """One worker's tensor parallel group and context parallel group, where a model uses both."""

    def __init__(self, features: TensorGroupOps, tokens: TensorGroupOps) -> None:
        """Combine the two groups; from now on each refers to this object."""
        self.features, self.tokens = features, tokens
        self._is_in_layer = self._is_crossing = False
        features.combined = tokens.combined = self

    def follow(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function that has met a SplitTensor."""
        tensors = list(tensors_in((args, kwargs)))
        if not any(isinstance(one, SplitTensor) and one.ops is self.features for one in tensors):
            return self.tokens.follow(func, args, kwargs)
        with self._features_alone(tensors), self.on_parts():
            found = self.features.follow(func, args, kwargs)
        if not self._is_in_layer:
            _become(SplitTensor, (one for one in tensors_in(found) if isinstance(one, TokenSplitTensor)))
        return found

    def in_layer(self, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run the forward of a tensor parallel layer: in it tokens look whole."""
        tensors = list(tensors_in((args, kwargs)))
        with self._features_alone(tensors):
            former, self._is_in_layer = self._is_in_layer, True
            try:
                found = forward(*args, **kwargs)
            finally:
                self._is_in_layer = former
        _become(SplitTensor, (one for one in tensors_in(found) if isinstance(one, TokenSplitTensor)))
        return found

    def run_in_layer(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function that has met a TokenSplitTensor in the forward of a layer."""
        known = [one for one in tensors_in((args, kwargs)) if isinstance(one, TokenSplitTensor)]
        _become(SplitTensor, known)
        try:
            found = func(*args, **kwargs)
        finally:
            _become(TokenSplitTensor, known)
        self._hide(found)
        return found

    @contextlib.contextmanager
    def on_parts(self) -> Iterator[None]:
        """Within it a part of the features is an ordinary tensor, and tokens are still split."""
        with on_parts(), _TokenOps(self):
            yield

    def crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Return the result of a collective of the tensor parallel group, with tokens split as those of `tensor`."""
        way = _way(tensor)
        former, self._is_crossing = self._is_crossing, True
        try:
            with on_parts():
                found = move()
        finally:
            self._is_crossing = former
        if found is tensor or way is None:
            return found
        shown: Any = found
        shown.__class__ = TokenSplitTensor
        shown.ops, shown.split_dim, shown.sections, shown.site = way
        return found

    @contextlib.contextmanager
    def _features_alone(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within it tensors that are split along tokens only look whole."""
        token_splits = [one for one in tensors if isinstance(one, SplitTensor) and one.ops is self.tokens]
        _become(TokenSplitTensor, token_splits)
        try:
            yield
        finally:
            _become(SplitTensor, token_splits)

    def _hide(self, found: Any) -> None:
        _become(
            TokenSplitTensor,
            (one for one in tensors_in(found) if isinstance(one, SplitTensor) and one.ops is self.tokens),
        )

    def along_tokens(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function that a rule for features has called."""
        tensors = {
            id(one): one for one in tensors_in((args, kwargs)) if isinstance(one, (SplitTensor, TokenSplitTensor))
        }
        if self._is_crossing or not any(
            isinstance(one, TokenSplitTensor) or one.under is not None for one in tensors.values()
        ):
            return func(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for one in tensors.values():
                stack.callback(_shown_to_tokens(one))
            found = self.tokens.follow(func, args, kwargs)
            _become(
                TokenSplitTensor,
                (one for one in tensors_in(found) if isinstance(one, SplitTensor) and id(one) not in tensors),
            )
        return found


class _TokenOps(TorchFunctionMode):
    """Passes every function that a rule for features calls to `along_tokens`."""

    def __init__(self, both: TensorContextOps) -> None:
        super().__init__()
        self._both = both

    def __torch_function__(
        self, func: Func, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return self._both.along_tokens(func, args, kwargs or {})


def _shown_to_tokens(one: SplitTensor | TokenSplitTensor) -> Callable[[], None]:
    """Make a tensor look as rules for tokens see it; returns a function that undoes it."""
    shown: Any = one
    if isinstance(one, TokenSplitTensor):
        shown.__class__ = SplitTensor
        return lambda: _become(TokenSplitTensor, [one])
    if one.under is None:
        shown.__class__ = Tensor
        return lambda: _become(SplitTensor, [one])
    former = (one.ops, one.split_dim, one.sections, one.site, one.under)
    (shown.ops, shown.split_dim, shown.sections, shown.site), shown.under = one.under, None

    def back() -> None:
        shown.ops, shown.split_dim, shown.sections, shown.site, shown.under = former

    return back


def _way(tensor: Tensor) -> SplitSpec | None:
    """Return how the tokens of a tensor are split, as features' rules and layers see it."""
    if isinstance(tensor, TokenSplitTensor):
        return SplitSpec(tensor.ops, tensor.split_dim, tensor.sections, tensor.site)
    return tensor.under if isinstance(tensor, SplitTensor) else None


def _become(kind: type[Tensor], tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
    for one in tensors:
        one.__class__ = kind
