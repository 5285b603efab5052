"""What one host brings to the meeting of a job's hosts, and what has to be the same on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.plan.job import Job

__all__ = ["Terms", "mismatch"]

PROTOCOL = 4  # of the messages between hosts; counted up when they change


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """This host's view of the job."""

    job: Job  # as it begins now
    asked: Job  # as this host's user started it
    plan: str | None
    attempt: int
    run_dir: str  # as this host's user wrote it
    host: str  # this host's name
    at: tuple[str, int]  # the meeting point: host and port
    token: bytes = dataclasses.field(repr=False)

    @property
    def point(self) -> str:
        """The meeting point, as the user wrote it."""
        return self.job.head or ""

    @property
    def essentials(self) -> dict[str, Any]:
        """What has to be the same on all hosts, in the user's words."""
        return {
            "protocol": PROTOCOL,
            "program": Path(self.job.program).name or "(a function)",
            "workers": self.asked.workers,
            "hosts": self.asked.hosts,
            "plan": self.plan or "(the script's)",
        }


def mismatch(head: Mapping[str, Any], host: Mapping[str, Any]) -> str:
    """Name what differs, with both values; "" where nothing does."""
    names = sorted(name for name in head.keys() | host.keys() if head.get(name) != host.get(name))
    return ", ".join(f"{name}: {head.get(name)!r} on the head, {host.get(name)!r} here" for name in names)
