"""Rounds of gossip: in the middle of a round replicas mix their weights with those of a few others.

They come together before, as for a round's end. So all hear of a replica that has to end the round or waits in an
operation, and none mixes with one that is at another step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.comm.group import WorkerGroup
from paceline.plan import Gossip
from paceline.sync.allreduce.buckets import NamedParameter
from paceline.sync.local.gossip import GossipStep
from paceline.worker.loop.communication_rounds import CommunicationRounds

__all__ = ["GossipRounds"]


class GossipRounds(CommunicationRounds):
    """Rounds in whose course replicas mix their weights."""

    _gossiping: Sequence[GossipStep] = ()
    _mixed_at = 0  # the step after which this replica has mixed its weights for the last time

    def _made(
        self, parameters: Sequence[NamedParameter], group: WorkerGroup, everybody: WorkerGroup
    ) -> Sequence[GossipStep]:
        sync, wire, seed = self._plan.sync, self._plan.wire, self._plan.batch.seed
        if not isinstance(sync, Gossip):
            raise ValueError(f"replicas under {sync!r} do not gossip")
        made = GossipStep(
            parameters,
            group=group,
            all_workers=everybody,
            sync=sync,
            wire=wire,
            seed=seed,
            holders=self._models.reducers.holders(),
        )
        self._gossiping = [made]
        return self._gossiping

    def is_over(self, is_save_due: Callable[[int], bool]) -> bool:
        """As `CommunicationRounds`; a save does not wait for the average, which is had for it."""
        return super().is_over(is_save_due) or (self.is_open and any(map(is_save_due, self._fresh)))

    def is_mixing_due(self, step: int) -> bool:
        sync = self._plan.sync
        if not isinstance(sync, Gossip) or not self.is_open or step == self._mixed_at:
            return False
        return any(one % sync.every == 0 for one in self._fresh)

    def _mix(self, step: int) -> None:
        for one in self._gossiping:
            self._consensus.do(lambda one=one: one.mix(step))
            one.take_mixed()
        self._weights_changed()
        self._mixed_at = step
