"""What a codec is: a generator that yields what must be exchanged between replicas, and receives what came of it.

A round is one `yield`: of a `SumPayload`, answered by the sum over replicas; of a `GatherPayload`, answered by
everybody's payload, one row for each replica, always in the same order; or of a `ScatterPayload`, a row for each
replica, answered by the rows that are for this one. The maths knows nothing of groups or transfers, and whoever drives
the generator knows nothing of the maths; between a yield and its answer other buckets run. Every replica yields the
same kinds and shapes in the same order, and ends with the same bits.

What a codec remembers from step to step it changes in two moves, because a step may be dropped: `exchange` prepares,
`settle` makes it count. A codec's memory has two parts: what is each replica's own (a residual), and what all of them
have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

__all__ = ["Codec", "CodecContext", "GatherPayload", "Payload", "Rounds", "ScatterPayload", "SumPayload"]


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
    """Whose exchange it is: the place among so many replicas, and a seed of this replica, bucket and step."""

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

        Returns what of this replica's numbers has reached the sum, where that is not all of them.
        """
        raise NotImplementedError  # the one method that has no default: every codec has its own

    def settle(self, used: Sequence[bool]) -> None:
        """The step counts: what the last exchange has prepared is remembered, for parameters that anybody `used`."""

    def drop(self) -> None:
        """The step does not count: what the last exchange has prepared is forgotten."""

    def own(self) -> Mapping[int, Tensor]:
        """By a parameter's place in the bucket: what this replica has still to send of it, 1-D."""
        return {}

    def common(self) -> Mapping[int, Mapping[str, Tensor]]:
        """By a parameter's place in the bucket: what all replicas remember of it, by name."""
        return {}

    def fill(self, own: Mapping[int, Tensor], common: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Remember what `own` and `common` gave somewhere else."""
