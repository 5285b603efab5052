"""Which worker runs where: pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from paceline.plan.job import Assignment, Job
from paceline.schedule import share

__all__ = ["assign", "deal", "share_of", "template", "worker_dir"]


def deal(workers: int, hosts: int) -> tuple[range, ...]:
    """The ranks of each host: contiguous, as even as can be, the first hosts one more where it does not divide.

    Raises ValueError where a host would stay without a worker.
    """
    if not 1 <= hosts <= workers:
        raise ValueError(f"{workers} workers cannot be dealt to {hosts} hosts: each host needs at least one")
    return share.deal(workers, hosts)


def template(
    job: Job,
    *,
    host: str,
    host_index: int,
    slots: int,
    address: str,
    run_dir: Path,
    attempt: int,
    command_started: float,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
    begins_at: int | None = None,
) -> Assignment:
    """What all workers of one host are told alike, but for their numbers; `job.workers` must be known."""
    if job.workers is None:
        raise ValueError("job.workers is None: it must be known before workers are dealt to hosts")
    return Assignment(
        rank=-1,
        workers=job.workers,
        local_rank=-1,
        local_workers=slots,
        host=host,
        host_index=host_index,
        hosts=job.hosts,
        address=address,
        run_dir=str(run_dir),
        attempt=attempt,
        worker_dir="",
        channel_fd=-1,
        command_started=command_started,
        job=job,
        plan=plan,
        overrides=tuple(overrides),
        given=tuple(given),
        begins_at=begins_at,
    )


def assign(alike: Assignment, ranks: Sequence[int]) -> tuple[Assignment, ...]:
    """What each worker of one host is told: `alike`, with its own numbers."""
    return tuple(
        dataclasses.replace(
            alike,
            rank=worker_rank,
            local_rank=local_rank,
            worker_dir=str(worker_dir(Path(alike.run_dir), alike.attempt, worker_rank)),
        )
        for local_rank, worker_rank in enumerate(ranks)
    )


def share_of(job: Job) -> int:
    """How many workers a host has room for that comes later: its share of those that the job begins with."""
    return max(1, (job.workers or 0) // job.hosts)


def worker_dir(run_dir: Path, attempt: int, worker_rank: int) -> Path:
    """Where a worker's logs, events and error.json are."""
    return run_dir / f"attempt_{attempt}" / f"worker_{worker_rank}"
