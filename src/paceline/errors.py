"""Everything Paceline raises on purpose.

    PacelineError
      PlanError         the plan or the job cannot work; found before anything starts      (also a ValueError)
      LaunchError       workers could not be started, or could not find each other
      WorkerError       a worker failed: which one, where, when, and its own traceback
        WorkersLostError  workers were only taken away: the same command goes on         (also a SystemExit)
      SyncError         workers could not agree: who is missing, since which step
      CheckpointError   a checkpoint could not be written or read
      RunFileError      a file of the run (ledger, events, metrics, ...) could not be written
      BadNumbersError   losses or weights have gone wrong, and the plan's guard ends the run

All survive pickling. Other mistakes in arguments raise plain ValueError or TypeError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "DISK_FULL",
    "BadNumbersError",
    "CheckpointError",
    "LaunchError",
    "PacelineError",
    "PlanError",
    "Reason",
    "RunFileError",
    "SyncError",
    "WorkerError",
    "WorkersLostError",
    "writing",
]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what an OSError then says


class PacelineError(Exception):
    """Base class of every error that Paceline raises on purpose. All of them survive pickling."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One thing that stands against a plan; `module` is a name in the model, or that of a part of the plan."""

    module: str
    what: str  # a sentence, with the values
    remedy: str  # a sentence, or several

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}".strip()


class PlanError(PacelineError, ValueError):
    """The plan or the job cannot work; the message says what is wrong with the values and what to do.

    Where a model was looked at, `reasons` are all that was found, and the message lists them.
    """

    def __init__(self, message: str = "", *, reasons: Sequence[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)

    @classmethod
    def listing(cls, headline: str, reasons: Sequence[Reason]) -> PlanError:
        """Return the error that tells all `reasons`, each once, behind a headline."""
        told = tuple(dict.fromkeys(reasons))
        texts = list(map(str, told))
        listed = f" {texts[0]}" if len(texts) == 1 else "".join(f"\n  - {text}" for text in texts)
        return cls(f"{headline}:{listed}", reasons=told)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan_error, (str(self), self.reasons)


class LaunchError(PacelineError):
    """Workers could not be started, or could not find each other; the command then ends with exit status 2.

    The message names the host or worker and the remedy: an address that nobody answers at, a token that differs, a host
    that never came. Nothing was trained.
    """


class WorkerError(PacelineError):
    """A worker failed; `paceline.run` raises it in the calling process, and the command ends with exit status 1.

    `str()` begins with the worker's own traceback where it had one. `worker` is its rank, `host` its host's name,
    `step` the last committed step, `exit_code` that of its process (negative: the signal that ended it).
    """

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


class WorkersLostError(WorkerError, SystemExit):
    """Workers or hosts were taken away, and too few are left; the same command goes on from the newest state.

    A script that does not catch it ends with status `code`, which is 76: a launcher may repeat the command then.

    Of a SystemExit nothing is shown: whoever raises it tells the message before.
    """

    def __init__(self, message: str, *, code: int, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.code = code

    @classmethod
    def like(cls, error: WorkerError, *, code: int) -> WorkersLostError:
        """Return it with what another error says."""
        fields = {name: getattr(error, name) for name in ("worker", "host", "step", "exit_code", "traceback")}
        return cls(str(error), code=code, **fields)

    def __reduce__(self) -> tuple[Any, ...]:
        _, fields = super().__reduce__()
        return _workers_lost, (self.code, *fields)


class SyncError(PacelineError):
    """Workers could not agree; the message says who is missing and since which step."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the message names the file."""


class BadNumbersError(PacelineError):
    """Losses or weights have gone wrong; the message says at which step, what was expected, and what to do."""


class RunFileError(PacelineError):
    """A file of the run could not be written; the message names it, says why, and what to do."""

    def __init__(self, message: str, *, path: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path, self.reason = path, reason

    @classmethod
    def about(cls, path: Path, error: OSError) -> RunFileError:
        """Return the error that tells of `path` what the system said."""
        reason = error.strerror or str(error)
        remedy = "Look at the disk and the rights there, or use another run_dir"
        if error.errno in DISK_FULL:
            remedy = "Free space there and start again with the same run_dir: it goes on from the newest checkpoint"
        return cls(f"{path} could not be written: {reason}. {remedy}.", path=str(path), reason=reason)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the body, which writes `path`, into a RunFileError."""
    try:
        yield
    except OSError as error:
        raise RunFileError.about(path, error) from error


def _plan_error(message: str, reasons: tuple[Reason, ...]) -> PlanError:
    return PlanError(message, reasons=reasons)


def _worker_error(
    message: str, worker: int, host: str, step: int, exit_code: int | None, traceback: str
) -> WorkerError:
    return WorkerError(message, worker=worker, host=host, step=step, exit_code=exit_code, traceback=traceback)


def _workers_lost(code: int, *fields: Any) -> WorkersLostError:
    return WorkersLostError.like(_worker_error(*fields), code=code)
