"""What a coordinator that takes over a run needs: what the lost one had told the register, and what hosts report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paceline.elastic.membership_messages import Finish, WorkerReport
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister
from paceline.launch.job.outcome import WorkerExit

__all__ = ["HostReport", "Takeover"]


@dataclasses.dataclass(kw_only=True)
class HostReport:
    """What a host tells a coordinator that takes over."""

    slots: int
    workers: dict[int, WorkerReport]  # that are there, or have ended as planned
    pids: dict[int, int]
    exits: list[WorkerExit]  # of workers that have failed and are not there any more
    finish: Finish | None  # what all workers were told, once the run is to end
    keeps: bool  # its workers keep snapshots in memory
    has_begun: bool
    kept: Mapping[str, str]  # the key-value store, without the rendezvous of single generations

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {
            "slots": self.slots,
            "workers": [[worker, dataclasses.asdict(report)] for worker, report in self.workers.items()],
            "pids": list(self.pids.items()),
            "exits": [dataclasses.asdict(ended) for ended in self.exits],
            "finish": None if self.finish is None else self.finish.to_json(),
            "keeps": self.keeps,
            "has_begun": self.has_begun,
            "kept": dict(self.kept),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostReport:
        """Read what `to_json` returned; raise LookupError, TypeError or ValueError if it is something else."""
        finish = data["finish"]
        return cls(
            slots=int(data["slots"]),
            workers={int(worker): WorkerReport.from_json(report) for worker, report in data["workers"]},
            pids={int(worker): int(pid) for worker, pid in data["pids"]},
            exits=[WorkerExit.from_json(ended) for ended in data["exits"]],
            finish=None if finish is None else Finish.from_json(finish),
            keeps=bool(data["keeps"]),
            has_begun=bool(data["has_begun"]),
            kept={str(key): str(value) for key, value in data["kept"].items()},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Takeover:
    """A run whose coordinator was lost or has left, and whose register this host has got."""

    register: HeadRegister
    record: HeadRecord  # as this coordinator has written it
    before: HeadRecord  # as the lost one had
    slots: int = 0  # workers that this process has room for; a host that has workers keeps them beside it

    @property
    def hosts(self) -> dict[int, str]:
        """Hosts that should return, by index: all but the lost coordinator's."""
        return {int(index): str(name) for index, name, _ in self.before.state["hosts"]}

    @property
    def workers(self) -> list[int]:
        """The ranks of all workers of a run with a fixed number of them."""
        return [int(worker) for worker in self.before.state["workers"]]

    def awaited(self, reports: Mapping[int, HostReport]) -> list[int]:
        """The workers whose ends the new coordinator waits for, by the `reports` of the hosts that have returned."""
        if self.before.state["elastic"] is None:
            return self.workers
        return [worker for report in reports.values() for worker, one in report.workers.items() if not one.has_ended]

    @property
    def has_left(self) -> bool:
        """Whether the coordinator was asked to leave, and had no workers any more."""
        return bool(self.before.state.get("left"))

    @property
    def reason(self) -> str:
        if self.has_left:
            return f"the coordinator's host {self.before.host} has left ({self.before.state['left']})"
        return f"the coordinator's host {self.before.host} was lost"
