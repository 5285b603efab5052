"""How workers of an examination meet: as members of their run, or, where hosts may not reach each other, by its store.

The store is with the coordinator, which each host has reached already. So pairs of hosts are measured before workers
connect to each other: a run needs all pairs, and fails at its start where one of them cannot connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any, Protocol

from paceline.comm.messages.json_channel import Channel
from paceline.comm.rendezvous.torch_store import SupervisorStore
from paceline.plan.job import Assignment

__all__ = ["Meeting", "StoreMeeting", "store_meeting"]


class Meeting(Protocol):
    """All workers call both, in the same order. A worker of a run is one."""

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of their ranks."""
        ...

    def wait(self) -> None:
        """Return when all workers have called this."""
        ...


class StoreMeeting:
    """Meets through a key-value store; values are those of JSON. SyncError after the store's own limit."""

    def __init__(self, store: Any, *, prefix: str, rank: int, workers: int) -> None:
        self._store, self._prefix, self._rank, self._workers = store, prefix, rank, workers
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, in the order of their ranks."""
        self._calls += 1
        keys = [f"{self._prefix}/{self._calls}/{rank}" for rank in range(self._workers)]
        self._store.set(keys[self._rank], json.dumps(value))
        self._store.wait(keys)
        return [json.loads(self._store.get(key)) for key in keys]

    def wait(self) -> None:
        """Return when all workers have called this."""
        self.gather(None)


@contextlib.contextmanager
def store_meeting(assignment: Assignment) -> Iterator[Meeting | None]:
    """Yield a meeting of a run's workers before they have joined it; None on one host, and where the launcher has no
    store. Leave it before the run begins: both read one socket.
    """
    if assignment.hosts < 2 or assignment.channel_fd < 0:
        yield None
        return
    channel = Channel(socket.socket(fileno=os.dup(assignment.channel_fd)))
    store = SupervisorStore(channel, timeout_s=assignment.job.timeout_s)
    try:
        yield StoreMeeting(
            store,
            prefix=f"paceline/doctor/{assignment.attempt}",
            rank=assignment.rank,
            workers=assignment.workers,
        )
    finally:
        channel.close()
