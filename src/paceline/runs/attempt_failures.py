"""How an attempt of a run failed: what the monitor reports, the exit status, and the exception for a Python caller."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.elastic.membership_messages import TOO_FEW
from paceline.errors import LaunchError, PlanError, WorkerError
from paceline.host_memory import memory_limit_bytes, oom_kills, oom_likely
from paceline.launch.job.outcome import WorkerExit
from paceline.monitor.records.failure import Failure, explain, root_cause

__all__ = ["error_from_failures", "exit_status", "worker_end"]


def exit_status(error: LaunchError | PlanError) -> int:
    """The exit status of a run that could not be started: 76 where an accident kept it from it, else 2."""
    return TOO_FEW if isinstance(error, LaunchError) and error.is_accident else 2


def error_from_failures(failures: Sequence[Failure]) -> WorkerError | PlanError:
    """Return the exception for a Python caller."""
    first = root_cause(failures)
    fields = first.error or {}
    if fields.get("usage"):
        return PlanError(str(fields.get("message", "")))
    return WorkerError(
        explain(failures),
        worker=first.worker,
        host=first.host,
        step=int(fields.get("step") or first.step),
        exit_code=first.exit_code,
        traceback=str(fields.get("traceback", "")),
    )


def worker_end(exit: WorkerExit, *, oom_kills_before: int | None) -> Failure:
    """A worker's end as the monitor reports it."""
    fields = exit.error or {}
    limit = memory_limit_bytes()
    return Failure(
        worker=exit.worker,
        host=exit.host,
        pid=exit.pid,
        exit_code=exit.exit_code,
        signal=exit.signal,
        error=exit.error,
        step=int(fields.get("step") or 0),
        peak_memory_bytes=exit.peak_memory_bytes,
        memory_limit_bytes=limit,
        oom_likely=oom_likely(
            exit.signal,
            peak_memory_bytes=exit.peak_memory_bytes,
            memory_limit_bytes=limit,
            oom_kills_before=oom_kills_before,
            oom_kills_after=oom_kills(),
        ),
        sent_by_us=exit.sent_by_us,
        is_early=exit.is_early,
        name=exit.name,
    )
