"""PowerSGD: send gradients as factors of low rank.

A gradient that is a matrix M (rows x columns) travels as a product P Q', found by a power iteration that continues from
step to step (Vogels et al. 2019, "PowerSGD"): the factor of the last step, made orthonormal, starts the next one. Both
factors in every step would take two rounds; here they alternate (Zhang et al. 2023, "ACP-SGD"), in one:

    a step:      P = sum over replicas of M_i Q       M is about P Q'        then P is made orthonormal, for
    the next:    Q = sum over replicas of M_i' P      M is about P Q'        then Q is made orthonormal, and so on

A replica's own part of the sum is P_i Q', the projection of M_i, so error feedback is exact. Vectors, and matrices that
would hardly shrink, travel whole in the same payload. All of it is in bf16.

Bytes, for a matrix: 2 rank rows in one step and 2 rank columns in the next, of 4 rows columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds, SumPayload
from paceline.schedule.payload_sizes import is_factored
from paceline.schedule.sample_order import mix

__all__ = ["PowerSGDCodec"]

LEFT, RIGHT = "left", "right"  # of the sides of a matrix: which has the orthonormal factor


@dataclasses.dataclass(frozen=True, slots=True)
class _Start:
    """An orthonormal factor, (n, rank): of the rows (left) or of the columns (right)."""

    side: str
    factor: Tensor

    def projected(self, matrix: Tensor) -> Tensor:
        """Return the other factor."""
        return (matrix if self.side == RIGHT else matrix.t()) @ self.factor

    def expand(self, other: Tensor, *, out: Tensor) -> None:
        """Compute the matrix of both factors."""
        other = other.view(-1, self.factor.shape[1])
        torch.mm(*((other, self.factor.t()) if self.side == RIGHT else (self.factor, other.t())), out=out)

    def following(self, other: Tensor) -> _Start:
        """Return the start of the next step: the other factor, orthonormal."""
        other = other.view(-1, self.factor.shape[1])
        return _Start(LEFT if self.side == RIGHT else RIGHT, torch.linalg.qr(other).Q)


class PowerSGDCodec(Codec):
    """`shapes`: rows and columns of each parameter in the bucket, in the order of its memory; (n, 1) of a vector."""

    elementwise = False

    def __init__(self, rank: int, *, shapes: Sequence[tuple[int, int]]) -> None:
        self.rank = rank
        self._shapes = list(shapes)
        self._factored = [place for place, shape in enumerate(shapes) if is_factored(*shape, rank)]
        self._starts: dict[int, _Start] = {}
        self._next: dict[int, _Start] = {}

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        self.drop()
        numbers = flat.float()
        parts = numbers.split([rows * columns for rows, columns in self._shapes])
        starts = {place: self._start(place, flat.device) for place in self._factored}
        sent = [
            starts[place].projected(part.view(self._shapes[place])) if place in starts else part
            for place, part in enumerate(parts)
        ]
        sizes = [one.numel() for one in sent]
        payload = torch.cat([one.reshape(-1) for one in sent]).bfloat16()
        own = torch.empty_like(numbers)
        self._expand(payload.float().split(sizes), starts, out=own)
        summed = yield SumPayload(payload)
        total = torch.empty_like(numbers)
        found = summed.float().split(sizes)
        self._expand(found, starts, out=total)
        flat.copy_(total)
        self._next = {place: start.following(found[place]) for place, start in starts.items()}
        return own

    def settle(self, used: Sequence[bool]) -> None:
        self._starts.update((place, start) for place, start in self._next.items() if used[place])
        self._next = {}

    def drop(self) -> None:
        self._next = {}

    def common(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {place: {start.side: start.factor} for place, start in self._starts.items()}

    def fill(self, own: Mapping[int, Tensor], common: Mapping[int, Mapping[str, Tensor]]) -> None:
        for place, named in common.items():
            for side, factor in named.items() if place in self._factored else ():
                length = self._shapes[place][0 if side == LEFT else 1]
                if factor.shape == (length, self.rank):  # otherwise the rank is another one now
                    self._starts[place] = _Start(side, factor.clone())

    def _start(self, place: int, device: torch.device) -> _Start:
        """Return a matrix's current factor; at first, the same random numbers on all replicas."""
        if place not in self._starts:
            rows, columns = self._shapes[place]
            generator = torch.Generator().manual_seed(mix(place, rows, columns) >> 1)
            drawn = torch.randn(columns, self.rank, generator=generator)
            self._starts[place] = _Start(RIGHT, torch.linalg.qr(drawn).Q.to(device))
        return self._starts[place]

    def _expand(self, sent: Sequence[Tensor], starts: Mapping[int, _Start], *, out: Tensor) -> None:
        """Turn factors into matrices again; whole parts are copied."""
        parts = out.split([rows * columns for rows, columns in self._shapes])
        for place, (part, values) in enumerate(zip(parts, sent, strict=True)):
            if place in starts:
                starts[place].expand(values, out=part.view(self._shapes[place]))
            else:
                part.copy_(values)
