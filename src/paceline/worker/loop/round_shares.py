"""Which replica runs which micro-batches of a round, also when replicas are lost in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.comm.group import WorkerGroup
from paceline.schedule.micro_batches import MicroBatch, split_evenly
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.membership.consensus import Consensus

__all__ = ["RoundShare", "RoundShares"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundShare:
    """What one replica runs of one step of the round."""

    batch: StepBatch  # as this worker was given it
    step: int
    owner: int  # the replica's number
    micros: tuple[MicroBatch, ...]

    @property
    def num_samples(self) -> int:
        return sum(micro.num_samples for micro in self.micros)


class RoundShares:
    """The shares of all replicas in one worker's present round."""

    def __init__(self, consensus: Consensus, group: WorkerGroup, *, workers_each: int) -> None:
        self._consensus, self._group, self._workers_each = consensus, group, workers_each
        self._shares: list[RoundShare] = []  # this replica's were run
        # What this replica has run of lost replicas' shares, by their index.
        self._run_for_others: dict[int, list[MicroBatch]] = {}

    @property
    def _own(self) -> int:
        """This replica's number."""
        return self._consensus.rank // self._workers_each

    def replicas(self) -> list[int]:
        """The numbers of the replicas that take part, in the order of their shares."""
        return list(dict.fromkeys(rank // self._workers_each for rank in self._consensus.ranks))

    def add(self, batch: StepBatch) -> None:
        """Add all replicas' shares of a step."""
        self._shares += [
            RoundShare(batch=batch, step=batch.step, owner=owner, micros=micros)
            for owner, micros in batch.shares.items()
        ]

    def clear(self) -> None:
        """The round is over."""
        self._shares.clear()
        self._run_for_others.clear()

    @property
    def num_samples(self) -> int:
        """The round's samples. When it ends all were run: those of lost replicas by others."""
        return sum(share.num_samples for share in self._shares)

    @property
    def num_own(self) -> int:
        """The samples that this replica has run."""
        own = sum(share.num_samples for share in self._shares if share.owner == self._own)
        return own + sum(micro.num_samples for micros in self._run_for_others.values() for micro in micros)

    def weight(self) -> float:
        """How much this replica has run, as a part of what all that are present have. In the middle of a round, no
        replica has run yet what lost ones should have."""
        replicas = self.replicas()
        num_here = sum(share.num_samples for share in self._shares if share.owner in replicas)
        return self.num_own / num_here if num_here else 1 / len(replicas)

    def run_for_others(self) -> list[tuple[int, int]]:
        """What this replica has run of lost replicas' shares: the index of each share, and of the micro-batch."""
        return [(number, micro.index) for number, micros in self._run_for_others.items() for micro in micros]

    def redistribute_lost(self, run_more: Callable[[RoundShare], None]) -> None:
        """Divide the micro-batches of lost replicas among those that are left, and run this one's part by
        `run_more(share)`. All must call it.

        More replicas may be lost while some run these, and others have not begun. What a replica that is left reports
        as run is done, and all else is divided anew.
        """
        replicas = self.replicas()
        lost = [(number, one) for number, one in enumerate(self._shares) if one.owner not in replicas]
        if not lost:
            return
        done = {one for reported in self._group.gather_objects(self.run_for_others()) for one in reported}
        for number, share in lost:
            left = [micro for micro in share.micros if (number, micro.index) not in done]
            part = split_evenly(len(left), len(replicas))[replicas.index(self._own)]
            if part:
                micros = left[part.start : part.stop]
                run_more(dataclasses.replace(share, owner=self._own, micros=tuple(micros)))
                self._run_for_others.setdefault(number, []).extend(micros)
