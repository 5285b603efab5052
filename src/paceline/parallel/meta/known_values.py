"""Numbers of tensors that have none: what a mixture of experts does without values.

Which expert a token takes is a router's choice (topk, argmax, sort), and code that sends tokens to experts looks at it:
it counts, compares, and asks where. So a choice gets numbers, which spread evenly: token t takes the experts t k to
t k + k - 1, counted around. Integers of the data keep their numbers, such as masks and labels. What follows from such
numbers alone, and from new integers, is computed with them, beside the fake tensors. All other tensors stay without
numbers, and code that looks at those still raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (  # torch documents the mode, and has no public name for it
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.parallel.meta.fake_weights import fake_of
from paceline.parallel.meta.meta_device import USER_ERRORS
from paceline.parallel.meta.tensor_tree import map_tensors, tensors_in

__all__ = ["KnownValues"]

aten = torch.ops.aten
MOST = 1 << 22  # elements of a tensor whose numbers are kept
CHOICES = {aten.topk: 1, aten.sort: 1, aten.max: 1, aten.argmax: 0}  # which result has the places that were chosen
FACTORIES = (aten.arange, aten.zeros, aten.ones, aten.full, aten.scalar_tensor)
INDEXED = (aten.index, aten.index_put, aten.index_put_)
LOOKS_AT_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class KnownValues:
    """Runs operations on fake tensors of `mode`, and keeps the numbers of those that are known."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._numbers = WeakTensorKeyDictionary()

    def give(self, fake: Tensor, numbers: Tensor) -> None:
        """Let a fake tensor have these numbers; they are left alone."""
        if not numbers.is_meta and numbers.numel() <= MOST:
            self._numbers[fake] = numbers.detach().to("cpu", copy=True)

    def knows(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._numbers

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operation returns; fake tensors, or numbers that follow from known ones."""
        if func.overloadpacket in INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            args = (args[0], self._places(args[1]), *args[2:])
        given = tensors_in((args, kwargs))
        real = self._computed(func, args, kwargs) if self._is_known(func, given) else None
        if real is not None:
            if any(tag in func.tags for tag in LOOKS_AT_VALUES):
                made = map_tensors(real, lambda one: fake_of(self._mode, one))
                self._keep(made, real)
                return made
            result = func(*args, **kwargs)
            self._keep(result, real)
            return result
        result = func(*args, **kwargs)
        if func.overloadpacket in FACTORIES and not result.dtype.is_floating_point and result.numel() <= MOST:
            with unset_fake_temporarily():
                self._numbers[result] = func(*args, **kwargs)
        if func._schema.is_mutable:
            for tensor in tensors_in(result):
                self._numbers.pop(tensor, None)
        if func.overloadpacket in CHOICES and given and given[0].dim() and given[0].dtype.is_floating_point:
            self._choose(func, args, kwargs, tensors_in(result))
        return result

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation returns for the numbers; None where it refuses them, such as labels out of range."""
        with unset_fake_temporarily():
            try:
                return func(*self._real(args), **self._real(kwargs))
            except USER_ERRORS:
                return None

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices with the places in which known masks are true, in place of the masks."""
        found: list[Tensor | None] = []
        for one in indices:
            if one is None or one.dtype != torch.bool or one not in self._numbers:
                found.append(one)
                continue
            with unset_fake_temporarily():
                places = self._numbers[one].nonzero(as_tuple=True)
            for real in places:
                made = fake_of(self._mode, real)
                self._numbers[made] = real
                found.append(made)
        return found

    def _is_known(self, func: Any, given: Sequence[Tensor]) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        return bool(given) and all(tensor in self._numbers for tensor in given)

    def _real(self, value: Any) -> Any:
        return map_tensors(value, lambda one: self._numbers[one])

    def _keep(self, made: Any, real: Any) -> None:
        for fake, numbers in zip(tensors_in(made), tensors_in(real), strict=True):
            if numbers.numel() <= MOST:
                self._numbers[fake] = numbers
            else:
                self._numbers.pop(fake, None)

    def _choose(self, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor]) -> None:
        """Give numbers to a choice among the elements of a dim."""
        place, source = CHOICES[func.overloadpacket], args[0]
        names = [one.name for one in func._schema.arguments]
        dim = kwargs.get("dim", args[names.index("dim")] if "dim" in names and len(args) > names.index("dim") else -1)
        if len(results) <= place or not isinstance(dim, int) or results[place].numel() > MOST:
            return
        chosen, choices = results[place], source.shape[dim]
        keeps_dim = chosen.dim() == source.dim()
        each = int(chosen.shape[dim]) if keeps_dim else 1
        step = each if each < choices else 1  # sorted: a router takes the first few, of each token others
        with unset_fake_temporarily():
            rows = torch.arange(chosen.numel() // max(1, each))[:, None] * step
            numbers = (rows + torch.arange(each)) % max(1, choices)
            if keeps_dim:
                shape = [*chosen.shape]
                shape.append(shape.pop(dim))
                numbers = numbers.reshape(shape).movedim(-1, dim).contiguous()
            else:
                numbers = numbers.reshape(chosen.shape)
        self._numbers[chosen] = numbers
