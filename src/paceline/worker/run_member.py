"""A worker as a member of its run: which one it is, and what all workers do together between steps."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from paceline.worker.parts import WorkerParts

__all__ = ["RunMember", "parts_of"]

T = TypeVar("T")


class RunMember:
    """The part of a `Worker` that knows nothing of models, data and steps."""

    def __init__(self, parts: WorkerParts) -> None:
        self.rank, self.plan, self.device = parts.rank, parts.plan, parts.device
        self._parts, self._collectives = parts, parts.collectives
        self._place, self._group, self._consensus = parts.place, parts.place.group, parts.place.consensus

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker: worker 0, or, after that was lost, the next one."""
        return self._place.is_first(self.rank)

    @property
    def workers(self) -> int:
        """How many workers take part at present, in all replicas."""
        return len(self._consensus.present) or self._group.size

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of `value` over all workers, equal on all of them, with one all-reduce.

        A tensor must have the same shape on all workers, and the result has that shape; a number gives a 0-d float64
        tensor. Raises RuntimeError inside a step, and SyncError when a peer is missing.

        Example::

            assert worker.average(2.0).item() == 2.0
        """
        return self._collectives.average(value)

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks, on every worker.

        Values are pickled, and each travels to all workers. The first one's (`is_first`) comes first.
        Raises RuntimeError inside a step, and SyncError when a peer is missing.

        Example::

            ranks = worker.gather(worker.rank)
            assert ranks == list(range(worker.workers))
            path = worker.gather("runs/first" if worker.is_first else None)[0]
        """
        return self._collectives.gather(value)

    def wait(self) -> None:
        """Return when all workers have called this. No value moves between them.

        Raises RuntimeError inside a step, and SyncError after `timeout_s` without a peer.

        Example::

            if worker.is_first:
                ...  # for example: download the data
            worker.wait()
        """
        self._collectives.wait()


def parts_of(member: RunMember) -> WorkerParts:
    """Return what a worker is made of, for programs of Paceline's own that look beneath a training loop."""
    return member._parts  # pyright: ignore[reportPrivateUsage]  # of this very module; no user is to find it public
