"""Error feedback: what a codec could not send is added to what it sends the next time.

So nothing is lost, it only comes later: after any number of steps the received sums and the remainders add up to the
gradients (Seide et al. 2014; Stich & Karimireddy 2020). It wraps any codec that returns its contribution to the sum.

Memory: 8 bytes for each number, half for the committed remainder and half for that of the current step, because a
dropped step must leave the first as it was. Gradients of 16 bits are processed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, Rounds

__all__ = ["ErrorFeedback"]


class ErrorFeedback(Codec):
    """A lossy codec with a memory. `sizes`: of the parameters in the bucket, in their order."""

    def __init__(self, codec: Codec, *, sizes: Sequence[int]) -> None:
        self.elementwise, self.num_rounds = codec.elementwise, codec.num_rounds
        self._codec, self._sizes = codec, list(sizes)
        self._residual: Tensor | None = None  # of committed steps; None: nothing
        self._next: Tensor | None = None  # of the current step
        self._spare: Tensor | None = None  # the one of the two that is not in use

    def exchange(self, flat: Tensor, replica: CodecContext) -> Rounds:
        self.drop()
        numbers = flat if flat.dtype == torch.float32 else flat.float()
        if self._residual is not None:
            numbers.add_(self._residual)
        kept = torch.empty_like(numbers) if self._spare is None else self._spare
        self._spare = None
        kept.copy_(numbers)
        own = yield from self._codec.exchange(numbers, replica)
        if own is None:
            kept.zero_()
        else:
            kept.sub_(own)
        if numbers is not flat:
            flat.copy_(numbers)
        self._next = kept
        return None

    def settle(self, used: Sequence[bool]) -> None:
        self._codec.settle(used)
        before, after = self._residual, self._next
        if after is None:
            return
        for place, is_used in enumerate(used):
            if not is_used:  # no replica takes what was decoded, so all of it remains to be sent
                part = after.split(self._sizes)[place]
                part.zero_() if before is None else part.copy_(before.split(self._sizes)[place])
        self._residual, self._next, self._spare = after, None, before

    def drop(self) -> None:
        self._codec.drop()
        self._spare, self._next = self._next if self._next is not None else self._spare, None

    def own(self) -> Mapping[int, Tensor]:
        return {} if self._residual is None else dict(enumerate(self._residual.split(self._sizes)))

    def common(self) -> Mapping[int, Mapping[str, Tensor]]:
        return self._codec.common()

    def fill(self, own: Mapping[int, Tensor], common: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._codec.fill({}, common)
        if not own:
            return
        device = next(iter(own.values())).device
        residual = torch.zeros(sum(self._sizes), device=device)
        parts = residual.split(self._sizes)
        for place, held in own.items():
            parts[place].copy_(held.reshape(-1))
        self._residual = residual
