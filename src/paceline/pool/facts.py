"""What the pool knows of a run when it decides, and the terms that hold for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import PlanError

__all__ = ["PoolJob", "PoolTerms", "check_nodes"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolJob:
    """One run that wants devices. Times are seconds; a replica takes one device.

    `speedup(nodes, replicas)` is the pace on that many nodes, relative to one replica on one node. `attained` counts
    device-seconds, stand-stills included. `remaining` is the work that is left, in seconds at speed-up 1, or None where
    the run does not say it. `allocation` names the node of each replica that it has now.
    """

    speedup: Callable[[int, int], float]
    max_replicas: int
    min_replicas: int = 1  # 0 is read as 1: a run that has devices has one replica at least
    age: float = 0.0  # since it was submitted
    attained: float = 0.0
    restarts: int = 0  # changes of its allocation so far, the start not counted
    allocation: Sequence[str] = ()
    remaining: float | None = None
    priority: float = 1.0  # its seconds count so many times those of others
    deadline: float | None = None  # on the clock of `now`; needs `remaining`
    moving_s: float = 30.0  # it stands still for so long when its allocation changes
    waiting_s: float | None = None  # since it last had devices; None: the least that age and attained service leave
    held_s: float | None = None  # since it got devices after it had none; None: the longest that its service allows

    def __post_init__(self) -> None:
        if self.min_replicas < 0 or self.max_replicas < max(1, self.min_replicas):
            raise PlanError(
                f"A run asks for {self.min_replicas} to {self.max_replicas} replicas; give at least 0 as the minimum, "
                "and at least 1 and the minimum as the maximum."
            )
        for name in ("age", "attained", "restarts", "remaining", "moving_s", "waiting_s", "held_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise PlanError(f"{name} of a run is {value!r}; it has to be a number that is not negative.")
        if self.deadline is not None and self.remaining is None:
            raise PlanError(
                f"A run has the deadline {self.deadline:g} s, and does not say what it has left. "
                "Give `remaining` with it, or no deadline."
            )
        if not 0 < self.priority < math.inf:
            raise PlanError(f"The priority of a run is {self.priority!r}; it has to be above 0. 1 is that of others.")

    @property
    def fewest(self) -> int:
        """The replicas without which it does not run."""
        return max(1, self.min_replicas)

    def pace(self, nodes: int, replicas: int) -> float:
        """Return the speed-up on so many nodes; PlanError where it is no number, or negative."""
        found = float(self.speedup(nodes, replicas))
        if not 0 <= found < math.inf:
            raise PlanError(
                f"The speed-up of a run on {nodes} nodes with {replicas} replicas is {found!r}; return a number "
                "that is not negative, and 0 where it cannot run."
            )
        return found

    @property
    def waited(self) -> float:
        """Seconds that it has waited: since it last had devices where that is known, else at least in total."""
        if self.allocation:
            return 0.0
        return self.waiting_s if self.waiting_s is not None else max(0.0, self.age - self.attained / self.fewest)

    @property
    def held(self) -> float:
        """Seconds since it got devices after it had none, where that is known."""
        if not self.allocation:
            return 0.0
        return self.held_s if self.held_s is not None else self.attained / self.fewest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolTerms:
    """What holds for all runs of a pool; seconds."""

    interval_s: float = 60.0  # between two decisions
    patience_s: float = 1800.0  # a run that has waited so long goes before all others
    turn_s: float = 600.0  # a run that was let in keeps its minimum for so long, where runs take turns

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise PlanError(f"{field.name} is {getattr(self, field.name)!r}; it has to be above 0.")


def check_nodes(nodes: Mapping[str, int]) -> None:
    """Raise PlanError for a node without a sensible number of devices."""
    for name, devices in nodes.items():
        if devices < 0:
            raise PlanError(f"Node {name!r} has {devices} devices; give 0 or more.")
