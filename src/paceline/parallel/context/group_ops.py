"""The operations of one context parallel group: what happens when whole and sliced tensors meet.

A sliced tensor is a `SplitTensor` (see `parallel/tensor/split_tensor.py`): it has the data of this worker's tokens and
shows the shape of the whole. So positions, masks and tables that a model makes from the sizes it sees are those of the
whole sequence, and are sliced where they meet a sliced tensor. Only the collectives differ from those of tensor
parallelism (`collectives.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from paceline.errors import PlanError, Reason
from paceline.parallel.context import collectives
from paceline.parallel.context.collectives import ContextCollectives
from paceline.parallel.context.token_slices import num_tokens, slices
from paceline.parallel.tensor.split_shapes import CannotSplit, Sections
from paceline.parallel.tensor.split_tensor import (
    Rule,
    SplitTensor,
    TensorGroupOps,
    is_in_place,
    mapped,
    name_of,
    on_parts,
    split_tensors_in,
    wrap,
)

__all__ = ["AttentionKind", "ContextGroupOps"]

AttentionKind = Literal["heads", "ring"]


class ContextGroupOps(TensorGroupOps):
    """One worker's view of the group. `kind` says how attention is split where heads divide; elsewhere a ring is
    used.
    """

    group: ContextCollectives
    is_of_tokens = True

    def __init__(
        self, group: ContextCollectives, *, rules: Callable[[Callable[..., Any]], Rule], kind: AttentionKind
    ) -> None:
        super().__init__(group, rules=rules)
        self.kind = kind
        self.warns = True  # whether to warn of operations that gather

    # ---------------------------------------------------------------------------------------------------- slices

    def sliced(self, whole: Tensor, *, dim: int, site: str) -> Tensor:
        """Return this worker's slice of a whole tensor, as a SplitTensor; the tensor itself where there are too few
        tokens."""
        dim %= whole.ndim
        if whole.shape[dim] < self.size:
            return whole
        sections = (whole.shape[dim],)
        # contiguous, as the whole is, because code may view it
        part = self.scatter(whole, dim=dim, sections=sections).contiguous()
        return self.as_split(part.view_as(part), dim=dim, sections=sections, site=site)

    def as_split(self, part: Tensor, *, dim: int, sections: Sections, site: str) -> Tensor:
        """Make a fresh tensor a SplitTensor; raises CannotSplit where it does not have this worker's number of
        tokens.
        """
        if part.shape[dim] != self.num_tokens(sections):
            raise CannotSplit(f"a part has {part.shape[dim]} tokens, but should have {self.num_tokens(sections)}")
        return wrap(part, ops=self, dim=dim, sections=sections, site=site)

    def num_tokens(self, sections: Sections) -> int:
        """Return how many tokens of a dim in sections this worker holds."""
        return num_tokens(slices(sections, size=self.size, index=self.index))

    def gathered_tree(self, value: Any) -> Any:
        """Return nested tuples, lists and dictionaries with every tensor in them whole."""
        return mapped(value, lambda one: self.plain(one) if isinstance(one, SplitTensor) else one)

    # ------------------------------------------------------------------------------------------------- crossings

    def copy_to_group(self, tensor: Tensor) -> Tensor:
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        return collectives.total(tensor, self.group)

    def scatter(self, tensor: Tensor, *, dim: int, sections: Sections) -> Tensor:
        return collectives.slice_from(tensor, dim=dim, ranges=slices(sections, size=self.size, index=self.index))

    def gather(self, split: SplitTensor) -> Tensor:
        with on_parts():
            return collectives.gathered(split, self.group, dim=split.split_dim, sections=split.sections)

    def gather_for_group(self, split: SplitTensor) -> Tensor:
        return self.gather(split)

    def attended(self, kind: Literal["heads", "ring", "rows"], length: int) -> None:
        """Called by rules that split an attention of `length` queries; `kind` says how. Trials override it."""

    # --------------------------------------------------------------------------------------------- no rule applies

    def without_rule(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: CannotSplit
    ) -> Any:
        """Gather the tokens and run the function on the whole; raises PlanError where that would write into a copy."""
        splits = list(split_tensors_in((args, kwargs)))
        name = name_of(func)
        if is_in_place(func) and isinstance(args[0], SplitTensor):
            raise PlanError(str(self.in_place_refusal(func, args[0], reason)))
        if self.warns and (name, "") not in self._warned:
            self._warned.add((name, ""))
            warnings.warn(
                f"{name} needs the whole sequence ({reason}): tokens of a tensor {tuple(splits[0].shape)} are gathered "
                "on every worker each time, which is right but costs time and memory.",
                stacklevel=4,
            )

        def whole(value: Any) -> Any:
            return self.gather(value) if isinstance(value, SplitTensor) else value

        return func(*mapped(args, whole), **mapped(kwargs, whole))

    def in_place_refusal(self, func: Callable[..., Any], split: SplitTensor, reason: CannotSplit) -> Reason:
        return Reason(
            module=split.site,
            what=f"{name_of(func)} changes a tensor in place of which each worker has some tokens, behind "
            f"{split.site}: {reason}.",
            remedy="Write it without the change in place, or use Layout(context=1).",
        )
