"""What replicas need that take steps by themselves: a way to agree on weights, now and then.

`paceline.worker.loop.communication_rounds` says when; each way to agree (local SGD, gossip) has a file of its own here,
and is made of two halves. `exchange` sends and receives, and changes nothing that counts: a member may be lost in the
middle, and it is done again with those who are left. `take` comes when all have the result, and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.sync.allreduce.gradient_reducer import GradientReducer

__all__ = ["WeightAveraging"]


class WeightAveraging(Protocol):
    """How the replicas agree on the weights of one set of parameters."""

    @property
    def sums(self) -> GradientReducer:
        """What sends between replicas: it counts the bytes, and has what codecs remember."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """Holds what is to be remembered from one agreement to the next, as the state of `anchors`; None: nothing."""
        ...

    @property
    def anchors(self) -> Sequence[tuple[str, Parameter]]:
        """What stands for the parameters in `optimizer`, with the names of these."""
        ...

    @property
    def num_raw_bytes(self) -> int:
        """What this worker would send for one sum of all gradients, as they are."""
        ...

    def begin(self) -> None:
        """The weights of now are those that all have: steps of this replica follow."""
        ...

    def exchange(self, share: float, numbers: Sequence[float], *, step: int) -> list[float]:
        """Tell the others where this replica's weights are; blocks until theirs are here. `share`: how much of the
        samples since `begin` were this replica's, of 1. Returns the sums of `numbers` over all workers of the run, all
        of whom must call. Raises Disrupted."""
        ...

    def take(self) -> None:
        """Give this replica the weights that were agreed on."""
        ...

    def drop(self) -> None:
        """What was exchanged is void."""
        ...
