"""What the head and the workers say to each other about membership: plain data over the workers' channels.

worker -> head    elastic    the plan lets replicas come and go: the least and the most of them
                  begun      its first loop over batches has begun
                  keeps      it copies its state into memory that outlives it: all can begin again from there
                  kept       one more such copy counts; only its own host's supervisor hears that
                  ready      it has not the run's state, and waits to be taken in; `generation`: the newest it knows of
                  formed     it has joined a generation, has the run's state, and stands at this step
                  committed  its first step of a generation
                  stuck      a transfer of a generation failed, though nobody is known to be lost; `peer`: with whom
                  leaving    it was asked to go, by this `signal`
                  unserved   it has lost a parameter server, and all are to begin again; `cause`: how
                  left       the others go on without it, and it ends
                  over       it takes part in nothing any more: its last word, though its process may go on for long
                  alive      nothing else to say
head -> worker    form       a generation: who is in it, and whether it begins at once or between two steps
                  finish     save between two steps, and leave with this exit code
                  end        end at once
                  until      then, by `paceline.elastic.lease.clock`, end at once, unless a later one comes; said by its
                             own host's supervisor, where that is not the head
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["FROM_WORKERS", "PREEMPTED", "TOO_FEW", "Finish", "MembershipView"]

FROM_WORKERS = frozenset(
    {
        "elastic",
        "begun",
        "keeps",
        "ready",
        "formed",
        "committed",
        "stuck",
        "leaving",
        "unserved",
        "left",
        "over",
        "alive",
    }
)
PREEMPTED = 75  # exit code (EX_TEMPFAIL): everything is saved, run the same command again
TOO_FEW = 76  # exit code: workers or hosts were lost, and too few left; the same command goes on from the last save
AT_ONCE = -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MembershipView:
    """A generation of the membership. Higher numbers replace lower ones.

    One that is not planned follows a loss: all its members have the run's state. A planned one may admit newcomers; its
    other members are between two steps, and one of them sends the state.
    """

    generation: int
    members: tuple[int, ...]  # worker ranks, in the order of their places in the group
    planned: bool
    holds: bool  # too few to take steps: they wait for the next generation
    reason: str  # a sentence, for people
    is_spread: bool = False  # its members are on more than one host: they cannot share memory
    after: int = AT_ONCE  # who stands in this generation goes on until it is between two steps; anybody else does not

    def interrupts(self, generation: int) -> bool:
        """Return whether a worker in `generation` must drop its current step and join this one."""
        return self.generation > generation and (not self.planned or generation != self.after)

    def to_json(self) -> dict[str, Any]:
        return {"op": "form", **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> MembershipView:
        """Read it back; raise KeyError or TypeError if it is something else."""
        return cls(
            generation=int(message["generation"]),
            members=tuple(map(int, message["members"])),
            planned=bool(message["planned"]),
            holds=bool(message["holds"]),
            reason=str(message["reason"]),
            is_spread=bool(message["is_spread"]),
            after=int(message["after"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """All workers save between two steps, and leave."""

    exit_code: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"op": "finish", **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Finish:
        return cls(exit_code=int(message["exit_code"]), reason=str(message["reason"]))
