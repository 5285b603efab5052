"""Layers that are cut where sequences are shared, too: tensors that are cut twice, and whose rule a function follows.

A rule knows one cut. So a function is done by two rules, one inside the other. The rule for features comes first: to it
a tensor looks as if its tokens were whole. Whenever it calls a function itself, the rule for tokens does that, to which
a part of the features is an ordinary tensor, and which sees numbers as they are in memory: the exchange of heads and
tokens in attention takes a worker's own heads for all there are. What crosses between those who cut layers does not
look at tokens, and leaves them as they are.

    cut along            in user's code     in features' rules and layers     in tokens' rules
    both                 Cut (features)     Cut (features)                    Cut (tokens)
    features             Cut (features)     Cut (features)                    Tensor
    tokens               Cut (tokens)       Sliced                            Cut (tokens)

A tensor that is cut twice has its features' cut as its own, and that of its tokens `under` it. It is the same object
throughout, and so in one place of autograd's graph: only its class and what it says of itself change for a while.
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
    """Those who cut the layers of a model, and those who share its sequences, as one of them sees it."""

    def __init__(self, features: TensorGroupOps, tokens: TensorGroupOps) -> None:
        """From now on each of the two teams knows of the other."""
        self.features, self.tokens = features, tokens
        self._is_in_layer = self._is_crossing = False
        features.beside = tokens.beside = self

    def follow(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Do a torch function that has met a Cut."""
        given = list(tensors_in((args, kwargs)))
        if not any(isinstance(one, SplitTensor) and one.team is self.features for one in given):
            return self.tokens.follow(func, args, kwargs)
        with self._features_alone(given), self.on_parts():
            found = self.features.follow(func, args, kwargs)
        if not self._is_in_layer:
            _become(SplitTensor, (one for one in tensors_in(found) if isinstance(one, TokenSplitTensor)))
        return found

    def in_layer(self, forward: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Do the forward of a layer that is cut: in it tokens look whole."""
        given = list(tensors_in((args, kwargs)))
        with self._features_alone(given):
            former, self._is_in_layer = self._is_in_layer, True
            try:
                found = forward(*args, **kwargs)
            finally:
                self._is_in_layer = former
        _become(SplitTensor, (one for one in tensors_in(found) if isinstance(one, TokenSplitTensor)))
        return found

    def run_in_layer(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Do a torch function that has met a Sliced in the forward of a layer."""
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
        """Within it a part of the features is an ordinary tensor, and tokens are still cut."""
        with on_parts(), _TokenOps(self):
            yield

    def crossed(self, move: Callable[[], Tensor], tensor: Tensor) -> Tensor:
        """Return what comes of a move between those who cut layers: its tokens are cut as those of `tensor` are."""
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
        shown.team, shown.split_dim, shown.sections, shown.site = way
        return found

    @contextlib.contextmanager
    def _features_alone(self, given: Sequence[Tensor]) -> Iterator[None]:
        """Within it tensors that are cut along tokens alone look whole."""
        sliced = [one for one in given if isinstance(one, SplitTensor) and one.team is self.tokens]
        _become(TokenSplitTensor, sliced)
        try:
            yield
        finally:
            _become(SplitTensor, sliced)

    def _hide(self, found: Any) -> None:
        _become(
            TokenSplitTensor,
            (one for one in tensors_in(found) if isinstance(one, SplitTensor) and one.team is self.tokens),
        )

    def along_tokens(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Do a torch function that a rule for features has called."""
        given = {id(one): one for one in tensors_in((args, kwargs)) if isinstance(one, (SplitTensor, TokenSplitTensor))}
        if self._is_crossing or not any(
            isinstance(one, TokenSplitTensor) or one.under is not None for one in given.values()
        ):
            return func(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for one in given.values():
                stack.callback(_shown_to_tokens(one))
            found = self.tokens.follow(func, args, kwargs)
            _become(
                TokenSplitTensor,
                (one for one in tensors_in(found) if isinstance(one, SplitTensor) and id(one) not in given),
            )
        return found


class _TokenOps(TorchFunctionMode):
    """Sees every function that a rule for features calls."""

    def __init__(self, both: TensorContextOps) -> None:
        super().__init__()
        self._both = both

    def __torch_function__(
        self, func: Func, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return self._both.along_tokens(func, args, kwargs or {})


def _shown_to_tokens(one: SplitTensor | TokenSplitTensor) -> Callable[[], None]:
    """Make a tensor look as rules for tokens see it; returns what makes it look as before."""
    shown: Any = one
    if isinstance(one, TokenSplitTensor):
        shown.__class__ = SplitTensor
        return lambda: _become(TokenSplitTensor, [one])
    if one.under is None:
        shown.__class__ = Tensor
        return lambda: _become(SplitTensor, [one])
    former = (one.team, one.split_dim, one.sections, one.site, one.under)
    (shown.team, shown.split_dim, shown.sections, shown.site), shown.under = one.under, None

    def back() -> None:
        shown.team, shown.split_dim, shown.sections, shown.site, shown.under = former

    return back


def _way(tensor: Tensor) -> SplitSpec | None:
    """How the tokens of a tensor are cut, as features' rules and layers see it."""
    if isinstance(tensor, TokenSplitTensor):
        return SplitSpec(tensor.team, tensor.split_dim, tensor.sections, tensor.site)
    return tensor.under if isinstance(tensor, SplitTensor) else None


def _become(kind: type[Tensor], tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
    for one in tensors:
        one.__class__ = kind
