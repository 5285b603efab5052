"""Become a worker of a world that somebody else started: torchrun, srun or mpirun.

There is no supervisor then. The engine starts, ends and restarts processes; worker 0 picks the run directory and tells
the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from paceline import environment
from paceline.comm.meet import BoardThread, meet, meeting_port
from paceline.comm.store import BoardStore
from paceline.errors import LaunchError
from paceline.plan.job import Assignment, Job
from paceline.worlds import World

__all__ = ["joined"]


@contextlib.contextmanager
def joined(
    world: World,
    job: Job,
    *,
    run_dir: Callable[[], tuple[Path, int]],
    command_started: float,
    log: Callable[[str], None],
) -> Iterator[tuple[Assignment, dist.Store]]:
    """Meet the other workers; yield this one's assignment and the store they share.

    `run_dir()` is called on worker 0 only, and returns the run directory and the number of this attempt.
    """
    with _store(world, job, log) as store:
        prefixed = dist.PrefixStore("paceline", store)
        if world.worker_rank == 0:
            directory, attempt = run_dir()
            prefixed.set("run", f"{attempt} {directory.resolve()}")
        prefixed.wait(["run"], timedelta(seconds=job.timeout_s))
        attempt_text, _, directory_text = prefixed.get("run").decode().partition(" ")
        yield _assignment(world, job, Path(directory_text), int(attempt_text), command_started), store


def _assignment(world: World, job: Job, run_dir: Path, attempt: int, command_started: float) -> Assignment:
    one_host = world.local_workers == world.workers
    return Assignment(
        rank=world.worker_rank,
        workers=world.workers,
        local_rank=world.local_rank,
        local_workers=world.local_workers,
        host=socket.gethostname(),
        host_index=0 if one_host else world.worker_rank // world.local_workers,
        hosts=1 if one_host else -(-world.workers // world.local_workers),
        address="127.0.0.1" if one_host else _own_address(world),
        run_dir=str(run_dir),
        attempt=attempt,
        worker_dir=str(run_dir / f"attempt_{attempt}" / f"worker_{world.worker_rank}"),
        channel_fd=-1,
        command_started=command_started,
        job=dataclasses.replace(job, run_dir=str(run_dir), workers=world.workers),
    )


@contextlib.contextmanager
def _store(world: World, job: Job, log: Callable[[str], None]) -> Iterator[dist.Store]:
    if world.source == "torchrun":
        # torchrun has a store of its own running at this address, or leaves it to worker 0: torch knows which.
        rendezvous = dist.rendezvous(
            "env://", world.worker_rank, world.workers, timeout=timedelta(seconds=job.timeout_s)
        )
        store, _, _ = next(iter(rendezvous))
        yield store
        return
    server: BoardThread | None = None
    try:
        one_host = world.local_workers == world.workers
        channel, server = meet(
            worker_rank=world.worker_rank,
            address=f"\0paceline-{os.getuid()}-{world.source}-{world.job_id}" if one_host else _head(world),
            token=None if one_host else environment.token(job),
            timeout_s=job.timeout_s,
            log=log,
        )
        yield BoardStore(channel, timeout_s=job.timeout_s)
    finally:
        if server is not None:
            server.close()


def _head(world: World) -> tuple[str, int]:
    if world.head is None:
        raise LaunchError(
            f"{world.source} started {world.workers} workers on several hosts, but does not say where worker 0 is. "
            "Set MASTER_ADDR (and MASTER_PORT) to its host for all workers"
        )
    return world.head, world.head_port or meeting_port(world.job_id)


def _own_address(world: World) -> str:
    """The address of this host that faces the head (nothing is sent)."""
    host, port = _head(world)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    if address.startswith("127.") and world.worker_rank == 0:
        return socket.gethostbyname(socket.gethostname())
    return address


def started_at() -> float:
    """When this process began (time.time()), for the start-up time of a world that somebody else started."""
    ticks = (
        int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        if Path("/proc/self/stat").exists()
        else 0
    )
    if not ticks:
        return time.time()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
