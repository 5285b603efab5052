"""Which workers were there when: a stretch of time for each process that held a worker's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.events import Restarted, WorkerFailed, WorkerFinished, WorkerLeft, WorkerLost, WorkerStarted
from paceline.monitor.report.attempt_log import AttemptLog
from paceline.monitor.report.incidents import restart_of

__all__ = ["WorkerStay", "stays_of"]

ENDS = {"finished": "finished", "running": "present"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStay:
    """One process of a worker's place, from its start until it ended in some way. Times are seconds since 1970."""

    worker: int
    attempt: int
    host: str
    pid: int
    began: float
    ready: float  # in its group, and about to run the user's function
    ended: float
    end: str  # finished | lost | left | failed | stopped (with the attempt) | present (it goes on)


def stays_of(logs: Sequence[AttemptLog]) -> tuple[WorkerStay, ...]:
    """Return the stays of all workers whose start was recorded, by worker and time."""
    restarts = [*map(restart_of, logs[1:]), None]
    found = [stay for log, later in zip(logs, restarts, strict=True) for stay in _stays_of(log, later)]
    return tuple(sorted(found, key=lambda stay: (stay.worker, stay.began)))


def _stays_of(log: AttemptLog, later: Restarted | None) -> list[WorkerStay]:
    """Those of one attempt; `later` says of which workers' loss all began again, if they did."""
    done: list[WorkerStay] = []
    here: dict[int, WorkerStay] = {}

    def end(worker: int, when: float, how: str) -> None:
        stay = here.pop(worker, None)
        if stay is not None:
            done.append(dataclasses.replace(stay, ended=max(when, stay.began), end=how))

    for record in log.records:
        match record.event:
            case WorkerStarted(rank=worker) as started:
                end(worker, record.time - started.startup_s, "lost")  # its end was recorded by nobody
                here[worker] = WorkerStay(
                    worker=worker, attempt=log.attempt, host=started.host, pid=started.pid,
                    began=_began(log, record.time, started), ready=record.time, ended=log.ended, end="stopped",
                )  # fmt: skip
            case WorkerLost(rank=worker, silent_s=silent_s):
                end(worker, record.time - silent_s, "lost")
            case WorkerLeft(rank=worker):
                end(worker, record.time, "left")
            case WorkerFailed(rank=worker, follows=follows):
                end(worker, record.time, "stopped" if follows else "failed")
            case WorkerFinished(rank=worker):
                end(worker, record.time, "finished")
            case _:
                pass
    if later is not None:
        for worker in later.lost:
            end(worker, later.lost_at, "lost")
    for worker in [*here]:
        end(worker, log.ended, ENDS.get(log.state, "stopped"))
    return done


def _began(log: AttemptLog, ready: float, started: WorkerStarted) -> float:
    """When its process began: with the attempt, or where it came later so long before it was ready."""
    return max(log.began, ready - started.startup_s)
