"""Streaming rounds: each fragment of the weights is agreed on at steps of its own, while the replica takes others.

Fragment p of n is sent after the steps that are p * every // n more than a multiple of `every`, and lands `overlap`
steps later. All replicas send and take the same ones after the same steps, with no further message. So there is no step
at which all have equal weights, until something needs that: a save, the end of the data, or a request to leave, which
travels with the next fragment. Then all fragments under way land, and all are agreed on once more, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from paceline.errors import SyncError
from paceline.plan import LocalSGD
from paceline.sync.local.local_sgd import OuterStep
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.communication_rounds import CommunicationRounds
from paceline.worker.loop.round_shares import RoundShare

__all__ = ["StreamingRounds"]

STEP_MODULUS = 16  # steps are told apart by their number modulo this: sums of squares stay exact in single precision


class StreamingRounds(CommunicationRounds):
    """One worker's rounds, of `LocalSGD` that streams."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counts: list[list[int]] = []  # of each fragment: samples of this replica, and of all, since it was sent
        self._in_all = [0, 0]  # the same since all had equal weights
        self._advanced_to = -1
        self._lands_at: dict[int, int] = {}  # fragments under way, and the steps after which they land
        self._is_asked_for = False  # that all agree at once: a fragment that landed has brought the request to all

    def prepare(self, trained: Any) -> Sequence[WeightAveraging]:
        """As `CommunicationRounds`."""
        made = super().prepare(trained)
        if made:
            self._counts = [[0, 0] for _ in made]
        return made

    def _count(self, batch: StepBatch) -> None:
        for count in (*self._counts, self._in_all):
            count[0] += batch.num_here
            count[1] += batch.num_samples

    def advance(self) -> None:
        """Take the fragments that land after the fresh steps, and send those that are due."""
        for step in self._fresh:
            if step > self._advanced_to:  # another one is counted once more, and was sent
                self._advanced_to = step
                self._advance(step)

    def _advance(self, step: int) -> None:
        sync = self._sync
        for number, lands_at in [*self._lands_at.items()]:
            if step >= lands_at:
                self._land(number, step)
        for number in range(len(self._agreeing)):
            if self.is_open and step % sync.every == number * sync.every // len(self._agreeing):
                self._send(number, step)
                if not sync.overlap:
                    self._land(number, step)

    def is_over(self, is_save_due: Callable[[int], bool]) -> bool:
        """Whether all fragments are to be agreed on after the fresh steps."""
        return self.is_open and (self._is_asked_for or any(map(is_save_due, self._fresh)))

    def end(self, step: int, *, run_more: Callable[[RoundShare], None], is_wanted: bool = True) -> bool:
        """Agree on all fragments, where that is wanted; all do so after the same step."""
        if not is_wanted or not self._agreeing:
            return False
        for number in [*self._lands_at]:
            self._land(number, step, mixing=0.0)
        self._buffers.capture_anew(self._in_all[0], is_first=self._axes.expert_replica_group.index == 0)
        own_marks = marks = self._buffers.marks_of_replica()
        for fragment, (own, everybody) in zip(self._fragments, self._counts, strict=True):
            sent = [*_header(step, asks=False), *own_marks]
            _, *marks = self._checked(fragment.exchange(own / everybody if everybody else 0.0, sent, step=step), step)
        self._require_finite(self._agreeing, step)
        settle = self._combined(marks, self._in_all[1])
        for fragment, (_, everybody) in zip(self._fragments, self._counts, strict=True):
            if everybody:
                fragment.take()
            else:  # it was sent just now; what is left of the replica's own gives way
                fragment.drop()
            fragment.settle()
        settle()
        for count in (*self._counts, self._in_all):
            count[:] = [0, 0]
        if self._is_asked_for:
            self._consensus.change_is_due()
        self._is_asked_for = False
        self._close()
        return True

    @property
    def _sync(self) -> LocalSGD:
        return cast("LocalSGD", self._plan.sync)

    @property
    def _fragments(self) -> list[OuterStep]:
        return cast("list[OuterStep]", list(self._agreeing))

    def _share(self) -> float:
        """How much of the samples since all had equal weights this replica has run."""
        return self._in_all[0] / self._in_all[1] if self._in_all[1] else 0.0

    def _send(self, number: int, step: int) -> None:
        own, everybody = self._counts[number]
        asks = self._consensus.is_urgent or self._consensus.wants_change
        sent = [*_header(step, asks=asks), *(0.0 for _ in self._buffers.changed())]
        self._fragments[number].send(own / everybody if everybody else 0.0, sent, step=step)
        self._counts[number] = [0, 0]
        self._lands_at[number] = step + self._sync.overlap

    def _land(self, number: int, step: int, *, mixing: float | None = None) -> None:
        del self._lands_at[number]
        fragment = self._fragments[number]
        asks, *_ = self._checked(fragment.receive(), step)
        self._require_finite([fragment], step)
        fragment.take(mixing=self._sync.mixing if mixing is None else mixing)
        self._weights_changed()
        if asks:
            self._is_asked_for = True

    def end_of_data(self, step: int) -> None:
        """Nothing: a replica that sends after another step than the others is found out when that lands."""

    def _checked(self, received: Sequence[float], step: int) -> Sequence[float]:
        """What all have sent, except the steps after which they did. Raises SyncError where these differ."""
        steps, squares, *rest = received
        if self._group.size * squares != steps**2:
            raise SyncError(
                f"step {step}: what has landed was sent by some replicas after another step than by others. All must "
                "take the same steps: an iterable dataset must give the same items in the same order on every worker. "
                "Seed it, sort its files, and do not split it by worker yourself"
            )
        return rest


def _header(step: int, *, asks: bool) -> list[float]:
    residue = step % STEP_MODULUS
    return [float(residue), float(residue**2), float(asks)]
