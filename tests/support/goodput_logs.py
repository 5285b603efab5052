"""Logs of attempts, and the accounts of their time, as the tests of goodput make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from paceline.events import (
    Event,
    Record,
    SpikeSeen,
    WorkerFinished,
    WorkerStarted,
)
from paceline.monitor.report.attempt_log import AttemptLog, StepTime
from paceline.monitor.report.goodput import GoodputLedger

__all__ = ["SECONDS", "assert_whole", "finished", "log", "record", "spike", "started", "steps"]


SECONDS = {"data": 0.1, "compute": 0.6, "communication": 0.2, "optimizer": 0.05}  # of a step of one second


def record(when: float, event: Event, worker: int | None = None) -> Record:
    return Record(when, worker, event)


def started(when: float, worker: int, *, startup_s: float = 2.0, resumed_from_step: int = 0) -> Record:
    event = WorkerStarted(
        rank=worker, workers=2, host="a", pid=1, device="cpu", startup_s=startup_s, plan="",
        resumed_from_step=resumed_from_step,
    )  # fmt: skip
    return record(when, event, worker)


def finished(when: float, worker: int, step: int) -> Record:
    return record(when, WorkerFinished(rank=worker, step=step, peak_memory_bytes=1), worker)


def steps(first: int, last: int, began: float, *, length: float = 1.0) -> list[StepTime]:
    """Steps that follow each other without a gap."""
    return [StepTime(began + length * (step - first + 1), step, SECONDS) for step in range(first, last + 1)]


def log(records: Sequence[Record], told: Mapping[int, Sequence[StepTime]], **fields: Any) -> AttemptLog:
    values: dict[str, Any] = {
        "attempt": 1,
        "workers": 2,
        "began": 0.0,
        "ended": 20.0,
        "state": "finished",
        "exit_code": 0,
    }
    last = max((step.step for each in told.values() for step in each), default=0)
    values |= {
        "records": sorted(records, key=lambda one: one.time),
        "steps": lambda worker: told.get(worker, ()),
        "last_step": last,
    }
    return AttemptLog(**{**values, **fields})


def assert_whole(ledger: GoodputLedger, *, places: float) -> None:
    """No time is counted twice and none is left out."""
    assert sum(ledger.worker_s.values()) == pytest.approx(places)
    assert sum(ledger.wall_s.values()) == pytest.approx(ledger.duration_s)
    assert sum(map(sum, ledger.timeline.accounts.values())) == pytest.approx(places - ledger.worker_s["down"])
    for accounts in ledger.workers.values():
        assert all(seconds >= 0 for seconds in accounts.values())


def spike(when: float, step: int, action: str, to_step: int | None = None) -> list[Record]:
    seen = SpikeSeen(step=step, loss=50.0, expected=3.0, action=action, to_step=to_step)
    return [record(when + worker / 100, seen, worker) for worker in (0, 1)]  # all workers say it
