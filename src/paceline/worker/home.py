"""Which of a replica's workers has the word on a tensor of its state, where not all of them hold the same tensors."""

from __future__ import annotations

import dataclasses

__all__ = ["Home"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """A place along each axis whose workers have different tensors; None: each along it has a part of its own.

    Of what is whole (a count of steps, say, that goes with a tensor in parts) the first of these has the word.
    """

    stage: int = 0
    expert: int | None = 0
    tensor: int | None = 0
