"""Which worker runs where: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.plan.job import Assignment, Job
from paceline.schedule import share

__all__ = ["assign", "deal", "worker_dir"]


def deal(workers: int, hosts: int) -> tuple[range, ...]:
    """The ranks of each host: contiguous, as even as can be, the first hosts one more where it does not divide.

    Raises ValueError where a host would stay without a worker.
    """
    if not 1 <= hosts <= workers:
        raise ValueError(f"{workers} workers cannot be dealt to {hosts} hosts: each host needs at least one")
    return share.deal(workers, hosts)


def assign(
    job: Job,
    *,
    host: str,
    host_index: int,
    address: str,
    run_dir: Path,
    attempt: int,
    command_started: float,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
) -> tuple[Assignment, ...]:
    """What each worker of one host is told; `job.workers` must be known."""
    if job.workers is None:
        raise ValueError("job.workers is None: it must be known before workers are dealt to hosts")
    ranks = deal(job.workers, job.hosts)[host_index]
    return tuple(
        Assignment(
            rank=worker_rank,
            workers=job.workers,
            local_rank=worker_rank - ranks.start,
            local_workers=len(ranks),
            host=host,
            host_index=host_index,
            hosts=job.hosts,
            address=address,
            run_dir=str(run_dir),
            attempt=attempt,
            worker_dir=str(worker_dir(run_dir, attempt, worker_rank)),
            channel_fd=-1,
            command_started=command_started,
            job=job,
            plan=plan,
            overrides=tuple(overrides),
            given=tuple(given),
        )
        for worker_rank in ranks
    )


def worker_dir(run_dir: Path, attempt: int, worker_rank: int) -> Path:
    """Where a worker's logs, events and error.json are."""
    return run_dir / f"attempt_{attempt}" / f"worker_{worker_rank}"
