"""Everything Paceline raises on purpose.

    PacelineError
      PlanError         the plan or the job cannot work; found before anything starts      (also a ValueError)
      LaunchError       workers could not be started, or could not find each other
      WorkerError       a worker failed: which one, where, when, and its own traceback
        WorkersLostError  workers were only lost: the same command goes on               (also a SystemExit)
      SyncError         workers could not agree: which are missing, or which calls differ
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
    """Base class of every error that Paceline raises on purpose. All of them survive pickling.

    Catch it to handle all of them. Wrong arguments of a single call raise plain ValueError, TypeError or RuntimeError.

    Example::

        try:
            paceline.Plan.parse("replicas=0")
        except paceline.PacelineError as error:
            print(error)
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One reason why a plan cannot work; `module` is a name in the model, or that of a part of the plan."""

    module: str
    what: str  # a sentence, with the values
    remedy: str  # a sentence, or several

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}".strip()


class PlanError(PacelineError, ValueError):
    """The plan or the job cannot work. It is also a ValueError.

    Raised before any process starts where that is possible, otherwise by `worker.prepare()` on every worker. The
    message names the value, the legal range and the remedy. After a model was checked, `reasons` holds every problem
    that was found, and the message lists them. The command ends with exit status 2.

    Example::

        try:
            paceline.Plan.parse("replicas=4").require(workers=3)
        except paceline.PlanError as error:
            print(error)  # names both numbers, and what to change
    """

    def __init__(self, message: str = "", *, reasons: Sequence[Reason] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)

    @classmethod
    def listing(cls, headline: str, reasons: Sequence[Reason]) -> PlanError:
        """Return the error that lists all `reasons`, each once, after a headline."""
        distinct = tuple(dict.fromkeys(reasons))
        texts = list(map(str, distinct))
        listed = f" {texts[0]}" if len(texts) == 1 else "".join(f"\n  - {text}" for text in texts)
        return cls(f"{headline}:{listed}", reasons=distinct)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan_error, (str(self), self.reasons)


class LaunchError(PacelineError):
    """Workers could not be started, or could not find each other. Nothing was trained.

    Raised by `paceline.run()` in the process that starts the workers. The message names the host or worker and the
    remedy: an address without an answer, a different token, a missing host. The command ends with exit status 2, or
    with 76 where `is_accident`: something was taken away, or has not come yet, and the same command may work later. A
    script gets a `WorkersLostError` then.

    Example::

        def start(train):
            try:
                paceline.run(train, workers=8, hosts=2, head="node1:29500", token_file="token")
            except paceline.LaunchError as error:
                print(error)
    """

    def __init__(self, message: str = "", *, is_accident: bool = False) -> None:
        super().__init__(message)
        self.is_accident = is_accident

    def __reduce__(self) -> tuple[Any, ...]:
        return _launch_error, (str(self), self.is_accident)


class WorkerError(PacelineError):
    """A worker failed: its function raised an error, or its process ended.

    Raised by `paceline.run()` in the calling process, whatever the worker itself raised (`BadNumbersError`,
    `SyncError`, an error of the program). `str()` begins with the worker's own traceback where it had one. The command
    ends with exit status 1.

    `worker` is its rank, `host` its host's name, `step` the last committed step, `exit_code` that of its process
    (negative: the signal that ended it), `traceback` its traceback as text ("": it had none).

    Example::

        def start(train):
            try:
                paceline.run(train, workers=4)
            except paceline.WorkerError as error:
                print(error.worker, error.host, error.step, error.exit_code)
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
    """Workers or hosts were taken away, and too few are left. It is also a SystemExit; the program is not the cause.

    Raised by `paceline.run()` in a script; a notebook gets a plain `WorkerError`. A script that does not catch it ends
    with exit status `code`, which is 76: a launcher may repeat the command then. The same command continues from the
    newest state. Python prints nothing for a SystemExit, so the message is printed to standard error before.

    Example::

        def start(train):
            try:
                paceline.run(train, workers=4, run_dir="runs/first")
            except paceline.WorkersLostError as error:
                print(error.code)  # 76
                raise
    """

    def __init__(self, message: str, *, code: int, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.code = code

    @classmethod
    def like(cls, error: WorkerError, *, code: int) -> WorkersLostError:
        """Return it with what another error says."""
        fields = {name: getattr(error, name) for name in ("worker", "host", "step", "exit_code", "traceback")}
        return cls(str(error), code=code, **fields)

    def plain(self) -> WorkerError:
        """Return it as a notebook gets it: one that ends no process."""
        return _worker_error(str(self), self.worker, self.host, self.step, self.exit_code, self.traceback)

    def __reduce__(self) -> tuple[Any, ...]:
        _, fields = super().__reduce__()
        return _workers_lost, (self.code, *fields)


class SyncError(PacelineError):
    """Workers could not agree: a peer is missing, or workers entered different calls.

    Raised on the waiting workers by `step(batch)` and by every method of `Worker` that all workers call. It comes after
    `timeout_s` without a peer, or as soon as a mismatch is seen. The message names the call, and the missing workers
    and step where they are known. In the calling process it arrives as `WorkerError`. The command ends with exit status
    1. Look for a `return`, `break` or condition that only some workers reach.

    Example::

        def agree(worker):
            try:
                worker.wait()
            except paceline.SyncError as error:
                print(f"worker {worker.rank}: {error}")
                raise
    """


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; the message names the file.

    Raised by `worker.restore()`, by `worker.prepare()` of what comes back from a checkpoint, by saves, and by `paceline
    export`. A save is written in the background, so its error comes with the next save or at the end of the run. A
    damaged checkpoint is never loaded: name an older one, or use `fresh=True`. The command ends with exit status 1.

    Example::

        def resume(worker):
            try:
                return worker.restore("runs/first/checkpoints/step_00000100")
            except paceline.CheckpointError as error:
                print(error)
                return worker.restore()
    """


class BadNumbersError(PacelineError):
    """Losses or weights have gone wrong, and the plan's guard (`paceline.Guard`) ends the run.

    Raised on every worker by `step(batch)`, before the optimizer steps: for a loss spike, a loss that is not finite, or
    too many of them. It is also raised when replicas have unequal weights and no majority. The message gives the step,
    the value, the limit and the remedy. In the calling process it arrives as `WorkerError`, with exit status 1.

    Example::

        def careful(worker, step, batch):
            try:
                return step(batch)
            except paceline.BadNumbersError as error:
                print(f"after step {worker.step}: {error}")
                raise
    """


class RunFileError(PacelineError):
    """A file of the run (ledger, events, metrics, error report) could not be written.

    Raised by the worker or the supervisor that writes the file. `path` is the file, `reason` the system's own message.
    The usual cause is a full disk: free space and start the same command again, which continues from the newest
    checkpoint.

    Example::

        def write_row(path, line):
            try:
                path.write_text(line)
            except OSError as error:
                raise paceline.RunFileError(f"{path}: {error}", path=str(path), reason=str(error)) from error
    """

    def __init__(self, message: str, *, path: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.path, self.reason = path, reason

    @classmethod
    def about(cls, path: Path, error: OSError) -> RunFileError:
        """Return the error for `path` with the system's reason and a remedy."""
        reason = error.strerror or str(error)
        remedy = "Look at the disk and the rights there, or use another run_dir"
        if error.errno in DISK_FULL:
            cure = "Raise the limit of a file's size (ulimit -f)" if error.errno == errno.EFBIG else "Free space there"
            remedy = f"{cure} and start again with the same run_dir: it goes on from the newest checkpoint"
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


def _launch_error(message: str, is_accident: bool) -> LaunchError:
    return LaunchError(message, is_accident=is_accident)


def _worker_error(
    message: str, worker: int, host: str, step: int, exit_code: int | None, traceback: str
) -> WorkerError:
    return WorkerError(message, worker=worker, host=host, step=step, exit_code=exit_code, traceback=traceback)


def _workers_lost(code: int, *fields: Any) -> WorkersLostError:
    return WorkersLostError.like(_worker_error(*fields), code=code)
