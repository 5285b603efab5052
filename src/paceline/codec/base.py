"""What a codec is: a generator that yields what must be summed over replicas and receives the sum.

A round is one `yield`. The maths knows nothing of groups or transfers, and whoever drives the generator knows nothing
of the maths; between a yield and its answer other buckets run. Payloads are small or large tensors of any type; every
replica yields the same shapes in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from torch import Tensor

__all__ = ["Codec", "Rounds"]

Rounds = Generator[Tensor, Tensor, None]


class Codec(Protocol):
    """The running form of a Wire."""

    additive: bool  # the sum of payloads decodes to the sum: they may be reduced on the way
    elementwise: bool  # valid on any slice of the buffer
    exact: bool  # the sum is that of the buffers themselves, so other small numbers may travel with them

    def exchange(self, flat: Tensor) -> Rounds:
        """Replace `flat` (1-D) by its sum over replicas, in place, by the rounds that it yields."""
        ...
