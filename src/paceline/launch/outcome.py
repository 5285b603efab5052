"""How workers ended, and what follows for the job: data, and the one function that judges."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.elastic.notices import PREEMPTED, TOO_FEW, Finish

# What the exit code of a run means to whoever starts runs: these, do it again; 1 and 2, do not.
__all__ = ["Failure", "Outcome", "WorkerExit", "interrupted", "left", "lost", "read_error", "verdict"]

ERROR_BYTES = 1 << 20  # of an error.json, at most: a longer one is not what Paceline writes
TEXT_CHARS = 8192  # of a text in it: hundreds of workers' errors travel in one message; the file holds the whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """How one worker ended."""

    worker: int
    host: str
    pid: int
    exit_code: int | None  # None: killed by `signal`, or lost
    signal: int | None
    peak_memory_bytes: int
    error: Mapping[str, Any] | None  # what is in error.json
    sent_by_us: bool  # it ended after it was told to

    @property
    def has_left(self) -> bool:
        """Whether it ended because everybody was told to save and leave."""
        return self.exit_code in (PREEMPTED, TOO_FEW) and self.error is None

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.has_left

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerExit:
        """Read what `dataclasses.asdict` wrote; raises TypeError where it is not that."""
        made = cls(**data)
        numbers = (made.worker, made.pid, made.peak_memory_bytes, made.exit_code or 0, made.signal or 0)
        if not all(isinstance(number, int) for number in numbers) or not isinstance(made.error or {}, dict):
            raise TypeError(f"not a worker's end: {data}")
        return made


Failure = WorkerExit  # one that `failed`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the job ended on all hosts. Exit codes: 0, 1 failed, 2 a usage error, 75 and 76 saved and to
    be run again (`paceline.elastic.notices`), 128 + n stopped by signal n."""

    state: str  # "finished" | "failed" | "stopped"
    exit_code: int
    failures: tuple[Failure, ...] = ()
    reason: str = ""  # one sentence, where `failures` do not say it all
    exits: tuple[WorkerExit, ...] = ()  # of all workers, by worker

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the outcome again; only `failures` keep what was in error.json."""
        exits = tuple(dataclasses.replace(ended, error=None) for ended in self.exits)  # failures hold the errors
        return dataclasses.asdict(dataclasses.replace(self, exits=exits))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Read it back; raises TypeError or KeyError where it is not one."""
        return cls(
            state=data["state"],
            exit_code=data["exit_code"],
            failures=tuple(map(WorkerExit.from_json, data["failures"])),
            reason=data["reason"],
            exits=tuple(map(WorkerExit.from_json, data["exits"])),
        )


def verdict(exits: Sequence[WorkerExit]) -> Outcome:
    """The outcome when all workers have ended and nobody stopped the job."""
    failures = tuple(exit for exit in exits if exit.failed)
    if not failures:
        return Outcome(state="finished", exit_code=0, exits=tuple(exits))
    causes = [exit.error or {} for exit in failures if not exit.sent_by_us and not (exit.error or {}).get("echo")]
    usage = bool(causes) and all(error.get("usage") for error in causes)
    return Outcome(state="failed", exit_code=2 if usage else 1, failures=failures, exits=tuple(exits))


def left(finish: Finish, exits: Sequence[WorkerExit]) -> Outcome:
    """The outcome of a job whose workers have saved and left as they were told."""
    return Outcome(state="stopped", exit_code=finish.exit_code, reason=finish.reason, exits=tuple(exits))


def interrupted(signum: int, exits: Sequence[WorkerExit], *, by: str = "") -> Outcome:
    """The outcome of a job that was stopped by a signal to a supervisor: its workers' ends are no failures."""
    reason = f"stopped by {signal.Signals(signum).name}{by}"
    return Outcome(state="stopped", exit_code=128 + signum, reason=reason, exits=tuple(exits))


def lost(
    worker: int, *, host: str, pid: int, kind: str, message: str, echo: bool = False, sent_by_us: bool = False
) -> WorkerExit:
    """The end of a worker of which nothing is known but what `message` says."""
    error = {
        "kind": kind,
        "message": message,
        "traceback": "",
        "worker": worker,
        "host": host,
        "pid": pid,
        "step": 0,
        "time": time.time(),
        "usage": False,
        "echo": echo,
    }
    return WorkerExit(
        worker=worker,
        host=host,
        pid=pid,
        exit_code=None,
        signal=None,
        peak_memory_bytes=0,
        error=error,
        sent_by_us=sent_by_us,
    )


def read_error(worker_dir: Path) -> dict[str, Any] | None:
    """What a worker left in error.json, long texts cut; None where there is none, or where its writer was killed."""
    try:
        with open(worker_dir / "error.json", "rb") as file:
            error = json.loads(file.read(ERROR_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(error, dict):
        return None
    message, trace = str(error.get("message", "")), str(error.get("traceback", ""))
    if len(message) > TEXT_CHARS:
        error["message"] = message[:TEXT_CHARS] + " ..."
    if len(trace) > TEXT_CHARS:
        error["traceback"] = "...\n" + trace[-TEXT_CHARS:]  # its end says what was raised
    return error
