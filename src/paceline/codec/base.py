"""What a codec is: a generator that yields what must be exchanged between replicas, and receives the answers.

A round is one `yield`. A `SumPayload` is answered by the sum over replicas; a `GatherPayload` by all replicas'
payloads, one row each, always in the same order; a `ScatterPayload`, a row for each replica, by the rows for this one.
The arithmetic knows nothing of groups or transfers, and the driver of the generator knows nothing of the arithmetic.
Between a yield and its answer other buckets run. Every replica yields the same kinds and shapes in the same order, and
ends with the same bits.

A codec's memory changes in two moves, because a step may be dropped: `exchange` prepares, `settle` commits. It has two
parts: what belongs to each replica (the error feedback), and what all replicas share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Codec", "CodecContext", "GatherPayload", "Payload", "Rounds", "ScatterPayload", "SumPayload", "as_bytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class SumPayload:
    """A payload of any type of numbers that may be summed on the way, in place."""

    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class GatherPayload:
    """A payload that only its receiver can add up: 1-D, and equally long on all replicas."""

    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class ScatterPayload:
    """Rows, one for each replica: row k is for replica k alone."""

    tensor: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class CodecContext:
    """The replica's index and count, and a seed of this replica, bucket and step."""

    index: int
    count: int
    seed: int


Payload: TypeAlias = SumPayload | GatherPayload | ScatterPayload
Rounds: TypeAlias = Generator[Payload, Tensor, Tensor | None]


class Codec:
    """The running form of a Wire for one bucket. The defaults are those of a codec without a memory."""

    elementwise = True  # valid on any slice of a parameter
    exact = False  # the sum is that of the buffers themselves, so other small numbers may travel with them
    num_rounds = 1  # at most

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        """Replace `flat` (1-D) by its sum over replicas, in place, by the rounds that it yields.

        Returns this replica's contribution to the sum, if that is not all of its numbers.
        """
        raise NotImplementedError  # the one method that has no default: every codec has its own

    def settle(self, used: Sequence[bool]) -> None:
        """Commit what the last exchange has prepared, for parameters that any replica `used`."""

    def drop(self) -> None:
        """Discard what the last exchange has prepared."""

    def own(self) -> Mapping[int, Tensor]:
        """Return this replica's error feedback, 1-D, by the parameter's index in the bucket."""
        return {}

    def common(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Return what all replicas remember of a parameter, by name, by the parameter's index in the bucket."""
        return {}

    def fill(self, own: Mapping[int, Tensor], common: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Take over the `own` and `common` of another codec."""


def as_bytes(*parts: Tensor) -> Tensor:
    """Return tensors of any types as one row of bytes."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
