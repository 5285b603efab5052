"""The messages between coordinator and workers about an elastic run's membership, and the coordinator's decisions.

All of it is plain data; messages travel over the workers' channels. The wire format names them as follows.

worker -> coordinator    elastic    the plan allows replicas to join and leave: the least and the most of them;
                                    `joins_in_calls`: a program joins a generation in calls of its own
                         begun      its first loop over batches has begun
                         keeps      it copies its state into memory that outlives it: a restart can begin from there
                         kept       one more such copy is complete; only its own host's supervisor gets this
                         ready      it lacks the run's state, and waits to be admitted; `generation`: the newest known
                         formed     it has joined a generation, has the run's state, and is at this step; `undone`:
                                    steps that its program has undone by itself since the last one
                         committed  its first step of a generation
                         stuck      a transfer of a generation failed without a known loss; `peer`: with which worker
                         leaving    it was asked to leave, by this `signal`
                         unserved   it has lost a parameter server, and all must restart; `cause`: how
                         micro      micro-batches have so many `samples` from now on, and may have fewer
                         short      it got no memory in a step, and all must restart; `micro`: samples of a
                                    micro-batch that are to be tried, `cause`: how
                         left       the others go on without it, and it ends
                         over       it takes part in nothing any more: its last message, though its process may go on
                         alive      a heartbeat
coordinator -> worker    form       a generation: its members, and whether it begins at once or between two steps
                         finish     save between two steps, and leave with this exit code
                         end        end at once
                         until      end at once at this time (`paceline.elastic.lease.seconds_since_boot`), unless a
                                    later one comes; sent by the supervisor of a host without the coordinator
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = [
    "FROM_WORKERS",
    "PREEMPTED",
    "TOO_FEW",
    "Decision",
    "EndWorker",
    "Finish",
    "GiveUp",
    "Limits",
    "MembershipView",
    "StartReplica",
    "WorkerReport",
]

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
        "micro",
        "short",
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
    after: int = AT_ONCE  # workers in this generation first finish their current step; all others do not

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The fewest and the most replicas, and how long to wait for workers."""

    least: int
    most: int
    workers_each: int = 1  # of a replica
    silence_s: float = 10.0  # a worker that is silent for so long is lost
    starting_s: float = 300.0  # a worker that has sent nothing so long after its start is lost
    stuck_s: float = 1.0  # after a transfer has failed: by then the loss that caused it is known
    forming_s: float = 20.0  # a few workers must have joined a generation by then, on a machine with a core for each
    few_members: int = 8  # more members have more time, in proportion
    most_extensions: int = 2  # of that time, in a row, for late workers that are heard and that no other one blames
    handing_s: float = 600.0  # the same while a newcomer is being sent the state
    patience_s: float = 60.0  # with fewer than `least` replicas: then save, and end
    program_s: float | None = None  # workers whose programs join in calls of their own have so long, and no extension

    def joining_s(self, members: int, load: float, *, is_handing: bool = False) -> float:
        """How long so many members may take to join a generation, where `load` processes want each core. `is_handing`:
        a newcomer is being sent the state."""
        if self.program_s is not None:
            return self.program_s
        if is_handing:
            return self.handing_s
        return min(self.handing_s, self.forming_s * max(1.0, members / self.few_members, load))


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkerReport:
    """What the agent of a worker's host has seen of it, for a coordinator that takes over. The agent keeps it."""

    is_newcomer: bool = False  # it was started when others were at work, and lacks the run's state until it has formed
    formed: int = AT_ONCE  # the newest generation that it has formed; AT_ONCE: none
    ready: int | None = None  # it waits to be admitted, and knows of this generation
    stuck: tuple[int, int | None] | None = None  # a transfer of this generation failed, and with which worker
    leaving: str = ""  # the signal by which it was asked to leave
    is_over: bool = False  # it takes part in nothing any more
    has_ended: bool = False  # its process has ended, as planned
    has_saved: bool = False  # and all had saved together before
    step: int = 0  # the newest that it has committed

    def note(self, notice: Mapping[str, Any]) -> None:
        """Take in a notice of the worker; raise KeyError, TypeError or ValueError if it is invalid."""
        self.step = max(self.step, int(notice.get("step", 0)))
        match notice.get("op"):
            case "formed":
                self.formed, self.ready, self.stuck = int(notice["generation"]), None, None
            case "ready":
                self.ready = int(notice["generation"])
            case "stuck":
                peer = notice.get("peer")
                self.stuck = int(notice["generation"]), None if peer is None else int(peer)
            case "leaving":
                self.leaving = str(notice.get("signal", "SIGTERM"))
            case "over":
                self.is_over = True
            case _:
                pass

    @property
    def is_new(self) -> bool:
        """Whether it lacks the run's state."""
        return self.is_newcomer and self.formed == AT_ONCE

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerReport:
        """Read back `dataclasses.asdict`; raise KeyError or TypeError if it is something else."""
        ready, stuck = data["ready"], data["stuck"]
        return cls(
            is_newcomer=bool(data["is_newcomer"]),
            formed=int(data["formed"]),
            ready=None if ready is None else int(ready),
            stuck=None if stuck is None else (int(stuck[0]), None if stuck[1] is None else int(stuck[1])),
            leaving=str(data["leaving"]),
            is_over=bool(data["is_over"]),
            has_ended=bool(data["has_ended"]),
            has_saved=bool(data["has_saved"]),
            step=int(data["step"]),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartReplica:
    """Start the workers of a replica."""

    replica: int
    workers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndWorker:
    """Kill a worker: it may not take part any more, whatever it is doing."""

    worker: int
    reason: str
    silent_s: float = 0.0  # how long it had been silent
    is_loss: bool = True  # otherwise it is a newcomer that is no longer needed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """End the run: no replica is left that could go on."""

    reason: str


Decision = MembershipView | StartReplica | EndWorker | Finish | GiveUp
