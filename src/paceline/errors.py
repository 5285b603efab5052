"""Everything Paceline raises on purpose.

    PacelineError
      PlanError         the plan or the job cannot work; found before anything starts      (also a ValueError)
      LaunchError       workers could not be started, or could not find each other
      WorkerError       a worker failed: which one, where, when, and its own traceback
      SyncError         workers could not agree: who is missing, since which step
      CheckpointError   a checkpoint could not be written or read

All survive pickling. Other mistakes in arguments raise plain ValueError or TypeError.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointError", "LaunchError", "PacelineError", "PlanError", "SyncError", "WorkerError"]


class PacelineError(Exception):
    """Base of all errors below."""


class PlanError(PacelineError, ValueError):
    """The plan or the job cannot work; the message says what is wrong with the values and what to do."""


class LaunchError(PacelineError):
    """Workers could not be started or could not find each other."""


class WorkerError(PacelineError):
    """A worker failed; `str()` begins with its own traceback where it had one."""

    def __init__(
        self,
        message: str,
        *,
        worker: int,
        host: str = "",
        step: int = 0,
        exit_code: int | None = None,
        traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.worker, self.host, self.step = worker, host, step
        self.exit_code, self.traceback = exit_code, traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _worker_error, (str(self), self.worker, self.host, self.step, self.exit_code, self.traceback)


class SyncError(PacelineError):
    """Workers could not agree; the message says who is missing and since which step."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the message names the file."""


def _worker_error(
    message: str, worker: int, host: str, step: int, exit_code: int | None, traceback: str
) -> WorkerError:
    return WorkerError(message, worker=worker, host=host, step=step, exit_code=exit_code, traceback=traceback)
