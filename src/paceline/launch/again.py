"""How all begin again after a loss: what the head decides, and every host is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.events import Restarted
from paceline.launch.stock import Errand

__all__ = ["Again"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Again:
    """The beginning of the next attempt."""

    restarted: Restarted
    ranks: Mapping[int, tuple[int, ...]]  # of each host, by its index
    slots: Mapping[int, int]  # for how many workers each has room
    most: int  # workers with which the run began
    errands: tuple[Errand, ...] = ()  # snapshots that go to another host first
    workers_each: int | None = None  # of replicas that come and go; None: their number is fixed
    least: int = 1  # of such replicas
    keeps: bool = True  # what all do is in memory from the beginning, as it was before

    @property
    def workers(self) -> int:
        """How many begin."""
        return sum(map(len, self.ranks.values()))

    @property
    def num_hosts(self) -> int:
        """On how many hosts they are; others may have room only."""
        return sum(1 for ranks in self.ranks.values() if ranks)

    @property
    def begins_at(self) -> int | None:
        """The step whose state is in memory; None: the workers find it elsewhere, or begin anew."""
        return self.restarted.step if self.restarted.source == "memory" else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes it again."""
        ranks = [[index, list(ranks)] for index, ranks in self.ranks.items()]
        return {**dataclasses.asdict(self), "ranks": ranks, "slots": list(self.slots.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Again:
        """Read it back; raises TypeError or KeyError where it is not one."""
        return cls(
            restarted=Restarted(**data["restarted"]),
            ranks={int(index): tuple(map(int, ranks)) for index, ranks in data["ranks"]},
            slots={int(index): int(slots) for index, slots in data["slots"]},
            most=int(data["most"]),
            errands=tuple(Errand(**one) for one in data["errands"]),
            workers_each=data["workers_each"],
            least=int(data["least"]),
            keeps=bool(data["keeps"]),
        )
