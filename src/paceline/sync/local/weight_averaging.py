"""The interface of replicas that take steps by themselves: a way to agree on weights, now and then.

`paceline.worker.loop.communication_rounds` decides when. Each way to agree (local SGD, gossip) has a file of its own
here, and consists of two halves. `exchange` sends and receives, and changes nothing that counts: if a member is lost
meanwhile, it is repeated with the remaining ones. `take` is called when all have the result, and sends nothing.
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
        """What sends between replicas; it counts the bytes and holds the codecs' memory."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """Holds what lasts from one agreement to the next, as the state of `anchors`; None: nothing."""
        ...

    @property
    def anchors(self) -> Sequence[tuple[str, Parameter]]:
        """The tensors that represent the parameters in `optimizer`, with the parameters' names."""
        ...

    @property
    def num_raw_bytes(self) -> int:
        """What this worker would send for one uncompressed sum of all gradients."""
        ...

    def begin(self) -> None:
        """Declare that the current weights are those of all replicas; steps of this replica follow."""
        ...

    def exchange(self, share: float, numbers: Sequence[float], *, step: int) -> list[float]:
        """Exchange this replica's weights with the others'; blocks until theirs are here. Raises Disrupted.

        `share`: this replica's part, of 1, of the samples since `begin`. Returns the sums of `numbers` over all workers
        of the run, which must all call.
        """
        ...

    def take(self) -> None:
        """Give this replica the weights that were agreed on."""
        ...

    def drop(self) -> None:
        """Discard what was exchanged."""
        ...
