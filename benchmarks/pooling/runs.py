"""A simulated run: its progress on the devices that it is given, and what it knows of its own speed."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pooling.applications import Application, Placement, Submission, packed

__all__ = ["Knowledge", "SimulatedRun", "placement_of"]

Floats = NDArray[np.float64]
Goodput = Callable[[int, int], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Knowledge:
    """What a run knows of its speed: all that was measured, or only what it has seen itself, with an error."""

    sees_all: bool = True
    error: float = 0.0  # standard deviation of the logarithm of the speed-up, drawn once for each run and size
    says_remaining: bool = False


def placement_of(nodes: Sequence[str]) -> Placement:
    """Return the replicas on each node, in the order of the nodes."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return tuple(counts.values())


class SimulatedRun:
    """One run. It chooses its batch by itself, unless `fixed_batch`."""

    def __init__(self, asked: Submission, app: Application, *, knowledge: Knowledge, fixed_batch: bool = False) -> None:
        self.asked, self.app, self.name = asked, app, asked.name
        self.allocation: list[str] = []
        self.attained, self.restarts, self.finished_s = 0.0, -1, math.nan
        self.last_held_s = asked.submitted_s
        self.standing_s = 0.0  # that it will still stand still
        self._knowledge, self._batch = knowledge, asked.batch if fixed_batch else None
        self._epoch, self._progress = 0, 0.0
        self._seen: set[tuple[int, int]] = set()  # nodes and replicas that it has had
        self._noise = app.gradients(app.initial_batch, 0)
        self._local, self._passes = 0, 0
        self._tables: dict[tuple[int, int], float] = {}

    @property
    def says_remaining(self) -> bool:
        return self._knowledge.says_remaining

    @property
    def is_finished(self) -> bool:
        return not math.isnan(self.finished_s)

    @property
    def jct_s(self) -> float:
        """Seconds from submission to the end."""
        return self.finished_s - self.asked.submitted_s

    @property
    def max_replicas(self) -> int:
        """At most twice what it has had so far, as in the reference."""
        most = max((replicas for _, replicas in self._seen), default=0)
        return max(1, min(2 * most, self.app.max_replicas))

    @property
    def remaining_s(self) -> float:
        """The work that is left, in seconds on one replica at the present noise of gradients."""
        return (self.app.progress[-1] - self._progress) / self.goodput(1, 1)

    def speedup(self, nodes: int, replicas: int) -> float:
        """Return the pace relative to one replica, as this run knows it."""
        if not self._seen:
            return float(replicas)  # it has measured nothing yet
        exact = self.goodput(nodes, replicas) / self.goodput(1, 1)
        if replicas == 1 or not self._knowledge.error:
            return exact
        drawn = np.random.default_rng(zlib.crc32(f"{self.name} {nodes} {replicas}".encode())).standard_normal()
        return exact * math.exp(self._knowledge.error * float(drawn))

    def move(self, allocation: Sequence[str], stand_still_s: float) -> None:
        """Give it other devices, or none."""
        self.allocation = list(allocation)
        if allocation:
            self.restarts += 1
            self.standing_s = stand_still_s
            self._choose_batch()

    def advance(self, now: float, seconds: float) -> None:
        """Go on for so many seconds from `now`, or until it is finished."""
        if not self.allocation:
            return
        delay = min(self.standing_s, seconds)
        self.standing_s -= delay
        self.attained += delay * len(self.allocation)
        end, now = now + seconds, now + delay
        while now < end and not self.is_finished:
            took = self._advance_epoch(end - now)
            now += took
            self.attained += took * len(self.allocation)
            if self._epoch >= self.app.num_epochs:
                self.finished_s = now
        self.last_held_s = now

    def goodput(self, nodes: int, replicas: int) -> float:
        """Return progress per second with the best batch; on `nodes`, evenly."""
        key = (nodes, replicas)
        if key not in self._tables:
            self._tables[key] = self._best(packed(replicas, nodes))[0]
        return self._tables[key]

    def _advance_epoch(self, seconds: float) -> float:
        """Go on until the epoch's end, for at most so long; return how long it took."""
        placement = placement_of(self.allocation)
        batch = self._local * self._passes * len(self.allocation)
        step, sync = self.app.step_seconds(placement, self._local)
        square, variance = self.app.gradients(batch, self._epoch)
        self._learn(placement, (square, variance))
        gain = (variance + square) / (variance * self.app.initial_batch / batch + square)
        pace = gain / (step + (step - sync) * (self._passes - 1))
        to_go = self.app.progress[self._epoch] - self._progress
        if pace * seconds < to_go:
            self._progress += pace * seconds
            return seconds
        self._progress = self.app.progress[self._epoch]
        self._epoch += 1
        self._choose_batch()
        return min(seconds, to_go / pace)

    def _learn(self, placement: Placement, noise: tuple[float, float]) -> None:
        config = (len(placement), sum(placement))
        if config not in self._seen or noise != self._noise:
            self._seen.add(config)
            self._noise = noise
            self._tables = {}

    def _choose_batch(self) -> None:
        replicas, app = len(self.allocation), self.app
        if self._batch is not None:
            self._local, self._passes = app.split(replicas, self._batch)
        elif not self._seen:
            least = max(app.initial_batch, app.min_local * replicas)
            self._local, self._passes = app.split(replicas, least)
        else:
            _, self._local, self._passes = self._best(placement_of(self.allocation))

    def _best(self, placement: Placement) -> tuple[float, int, int]:
        """Return the best progress per second on a placement, with its local batch and passes."""
        key = (placement, self._noise)
        if self._knowledge.sees_all and key in self.app.best:
            return self.app.best[key]
        choices = self.app.choices(sum(placement))
        if not len(choices.local):
            return 0.0, 0, 0  # no batch is large enough for so many
        step, sync = self.app.seconds_of(placement)
        if not self._knowledge.sees_all:
            compute, sync = step - sync, self._expected_sync(placement, sync)
            step = compute + sync
        square, variance = self._noise
        gain = (variance + square) / (variance * self.app.initial_batch / choices.total + square)
        pace = gain / (step + (step - sync) * (choices.passes - 1))
        pace = np.where(np.isnan(pace), 0.0, pace)  # where nothing near was measured
        at = int(np.argmax(pace))
        found = float(pace[at]), int(choices.local[at]), int(choices.passes[at])
        if self._knowledge.sees_all:
            self.app.best[key] = found
        return found

    def _expected_sync(self, placement: Placement, sync: Floats) -> Floats:
        """Return the seconds of synchronizing that a run expects: those of the largest size seen, if any.

        So it is optimistic beyond what it has seen, as a model with that prior is (OSDI 2021, section 4.1).
        """
        nodes, replicas = len(placement), sum(placement)
        if any(seen[0] >= nodes and seen[1] >= replicas for seen in self._seen):
            return sync
        smaller = [seen for seen in self._seen if seen[0] <= nodes and 1 < seen[1] <= replicas]
        if not smaller or replicas == 1:
            return np.zeros_like(sync)
        nodes, replicas = max(smaller)
        return np.minimum(sync, self.app.mean_sync(packed(replicas, nodes)))
