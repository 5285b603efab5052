"""Drives the codecs of several buckets at once, so that the rounds of one overlap with those of others and with
backward.

All workers must start the same transfers in the same order, but arrivals differ between them. So the order follows from
the departures alone: when a bucket has left, those that left `LAG` departures earlier take their next round, oldest
first. Backward has covered their wait by then. A codec's last answer starts nothing, so it is taken after backward.
What is left then proceeds round by round, one bucket after the other.

The loss of a member may be noticed during backward, which is the user's code, by a bucket that leaves or waits. It is
raised at the end of the gradient pass, where all workers give up the step together.
"""

from __future__ import annotations

import time
from typing import TypeAlias

from paceline.comm.group import Disrupted
from paceline.sync.allreduce.buckets import Bucket, LocalBucket

__all__ = ["AnyBucket", "BucketPipeline"]

AnyBucket: TypeAlias = Bucket | LocalBucket
LAG = 2


class BucketPipeline:
    """The buckets of a gradient pass that have left, and have not landed."""

    def __init__(self) -> None:
        self.waited_s = 0.0  # in this gradient pass
        self._under_way: list[AnyBucket] = []  # oldest first
        self._num_departed = 0
        self._moved_at: dict[int, int] = {}  # by id of a bucket: how many had left when its round began
        self.disruption: Disrupted | None = None  # noticed while backward ran; nothing more can be sent then

    def begin(self) -> None:
        """Begin a gradient pass; transfers under way are forgotten."""
        self.waited_s, self._num_departed = 0.0, 0
        self._under_way.clear()
        self._moved_at.clear()
        self.disruption = None

    def departed(self, bucket: AnyBucket) -> None:
        """Register a bucket that has left, and let others take their next round."""
        self._num_departed += 1
        self.waited_s += bucket.waited_s
        self._moved_at[id(bucket)] = self._num_departed
        self._under_way.append(bucket)
        for one in [*self._under_way]:
            if self.disruption is None and one.may_send_more and self._moved_at[id(one)] <= self._num_departed - LAG:
                try:
                    self._advance(one)
                except Disrupted as disruption:
                    self.notice(disruption)

    def notice(self, disruption: Disrupted) -> None:
        """Record that a member was lost, as a departure or a round has shown: nothing more leaves in this gradient
        pass."""
        self.disruption = disruption

    def check(self) -> None:
        """Raise what was noticed."""
        if self.disruption is not None:
            raise self.disruption

    def finish(self) -> None:
        """Block until all have landed; raises Disrupted."""
        while self._under_way:
            for one in [*self._under_way]:
                self._advance(one)

    def _advance(self, bucket: AnyBucket) -> None:
        began = time.perf_counter()
        if bucket.advance():
            self._moved_at[id(bucket)] = self._num_departed
        else:
            self._under_way.remove(bucket)
        self.waited_s += time.perf_counter() - began
