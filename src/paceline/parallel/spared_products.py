"""Trial forwards that spare the products of weights: their shapes, and what depends on what, do not need them.

Most of a forward's time goes into them, and on many workers of one machine all run the same forward. In their place the
inputs' own columns are repeated, in another order and of other sizes, so results are as large as the inputs, finite
where those are, and no column is like another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it, and has no public name for it

from paceline.parallel.kept_attributes import kept_tensors

__all__ = ["USER_ERRORS", "sparing_products"]

T = TypeVar("T")
USER_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError)
STEP, SIZES = 7919, 31  # columns are taken that far from each other, times so many different factors near 1
aten = torch.ops.aten


def sparing_products(model: nn.Module, run: Callable[[], T]) -> T:
    """Return what `run()` does while products with the model's weights are spared; code that needs their numbers makes
    it raise, and then it runs again with them. What modules keep of spared products (caches, say) is taken from them.
    """
    put_back = kept_tensors(model.modules())
    try:
        with _SparedProducts(model):
            return run()
    except USER_ERRORS:
        pass
    finally:
        put_back()
    return run()


class _SparedProducts(TorchDispatchMode):
    """Answers matrix products of an input and one of the model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        plain = [one for one in model.parameters() if type(one) is nn.Parameter and not one.is_meta]
        self._weights = {place for one in plain if (place := one.untyped_storage().data_ptr())}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or else torch loads its compiler, two seconds and much memory, to keep it out of here

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is aten.mm.default and self._is_spared(*args):
            return _spread(args[0], args[1].shape[1])
        if func is aten.addmm.default and not kwargs and self._is_spared(*args[1:]) and args[0].dtype == args[1].dtype:
            return _spread(args[1], args[2].shape[1]) + args[0]
        return func(*args, **(kwargs or {}))

    def _is_spared(self, rows: Tensor, weight: Tensor) -> bool:
        """Whether this is a product that torch would compute, with a weight."""
        is_weight = not weight.is_meta and weight.untyped_storage().data_ptr() in self._weights
        return is_weight and rows.shape[1] == weight.shape[0] and rows.dtype == weight.dtype


def _spread(rows: Tensor, width: int) -> Tensor:
    if not rows.shape[1]:
        return rows.new_zeros(len(rows), width)
    places = torch.arange(width, device=rows.device) * STEP
    sizes = (places % SIZES).to(rows.dtype).div_(4 * SIZES).add_(0.875)
    return rows.index_select(1, places % rows.shape[1]).mul_(sizes)
