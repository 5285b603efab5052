"""Which workers take part in one worker's steps, and whose votes a gradient pass waits for."""

from __future__ import annotations

import dataclasses

from paceline.comm.group import WorkerGroup
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.step.step_outcome import StepVote
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["ReplicaVote", "StepScope"]


class ReplicaVote:
    """The vote of a gradient pass in which other replicas take no part: it asks nothing of them.

    When something cannot wait, all workers of this replica learn so from the pass's step metadata.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self.is_called = False  # to the other replicas

    @property
    def wants_change(self) -> bool:
        """Whether something cannot wait until the replicas agree again."""
        return self._consensus.is_urgent

    def change_is_due(self) -> None:
        """All workers of this replica know that it is to meet the others."""
        self.is_called = True

    def vote(self) -> bool:
        """The result counts at once: no other worker has a part in it."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepScope:
    """Which workers take part in one worker's steps."""

    place: WorkerContext  # the worker's place, as its steps see it
    group: WorkerGroup  # all that agree at the end of a gradient pass
    axes: ParallelGroups  # the groups of their replicas
    vote: StepVote
    is_alone: bool = False  # no other worker takes part
    counts_later: bool = False  # steps are those of one replica, and count when all replicas have agreed
