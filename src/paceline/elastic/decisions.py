"""The limits that the membership is given before a run, and the decisions it makes during one: plain data."""

from __future__ import annotations

import dataclasses

from paceline.elastic.membership_messages import Finish, MembershipView

__all__ = ["Decision", "EndWorker", "GiveUp", "Limits", "StartReplica"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The fewest and the most replicas, and how long to wait for workers."""

    least: int
    most: int
    workers_each: int = 1  # of a replica
    silence_s: float = 10.0  # a worker that has not been heard of for so long is lost
    starting_s: float = 300.0  # so is one that was never heard of, this long after it was started
    stuck_s: float = 1.0  # after a transfer has failed: by then a death behind it is known
    forming_s: float = 20.0  # a worker that has not joined a generation by then is in trouble
    handing_s: float = 600.0  # the same where a newcomer is being sent the state
    patience_s: float = 60.0  # with fewer than `least` replicas: then save, and end


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
    silent_s: float = 0.0  # how long nothing had been heard of it
    is_loss: bool = True  # otherwise it is a newcomer that is not wanted any more


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """No replica is left that could go on."""

    reason: str


Decision = MembershipView | StartReplica | EndWorker | Finish | GiveUp
