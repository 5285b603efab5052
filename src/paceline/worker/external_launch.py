"""Become a worker of a world that another launcher started: torchrun, srun or mpirun.

There is no supervisor then. The engine starts, ends and restarts processes; worker 0 picks the run directory and tells
the others. They meet at a store of worker 0's, which admits this user's processes on one host, and between hosts those
that prove the job's token. torchrun's own store admits any process: between hosts it only says at which port to meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from paceline import environment
from paceline.comm.rendezvous.external_launch import join_external_launch, own_address, rendezvous_port
from paceline.comm.rendezvous.torch_store import SupervisorStore
from paceline.errors import LaunchError, PacelineError
from paceline.plan.job import Assignment, Job
from paceline.world_detection import World

__all__ = ["JoinedWorld", "await_records_closed", "join_external_world", "started_at"]

LATE_S = 20.0  # until late workers are reported: imports take time
MEET_S = 0.02  # between two looks
RECORDS, RECORDS_S = "records_closed", 5.0  # worker 0's key in the store, and how long the others wait for it

_calls = (
    itertools.count()
)  # of `join_external_world` in this process: what is left of the last meeting is not taken for the next


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JoinedWorld:
    """Where this process found itself."""

    assignment: Assignment
    store: dist.Store
    hosts: tuple[tuple[int, ...], ...]  # the ranks on each host, in the order of their first ones


@contextlib.contextmanager
def join_external_world(
    world: World,
    job: Job,
    *,
    run_dir: Callable[[], tuple[Path, int]],
    command_started: float,
    log: Callable[[str], None],
) -> Iterator[JoinedWorld]:
    """Meet the other workers; yield this one's place among them.

    `run_dir()` is called on worker 0 only, and returns the run directory and the number of this attempt.
    """
    call = next(_calls)
    with _store(world, job, call, log) as shared:
        store = dist.PrefixStore(f"paceline_{call}", shared)
        limit = timedelta(seconds=job.timeout_s)
        names = [f"host_{worker_rank}" for worker_rank in range(world.workers)]
        store.set(names[world.worker_rank], socket.gethostname())
        if world.worker_rank == 0:
            directory, attempt = run_dir()
            _await_all(store, names, timeout_s=job.timeout_s, log=log)
            hosts = [store.get(name).decode() for name in names]
            store.set("run", json.dumps({"run_dir": str(directory.resolve()), "attempt": attempt, "hosts": hosts}))
        store.wait(["run"], limit)
        run = json.loads(store.get("run"))
        own = _assignment(world, job, command_started, **run)
        by_host: dict[str, list[int]] = {}
        for number, host in enumerate(run["hosts"]):
            by_host.setdefault(host, []).append(number)
        yield JoinedWorld(assignment=own, store=store, hosts=tuple(map(tuple, by_host.values())))


def _await_all(store: dist.Store, names: Sequence[str], *, timeout_s: float, log: Callable[[str], None]) -> None:
    """Return when all workers have come; report those that do not. Raises LaunchError after `timeout_s`."""
    began, is_told = time.monotonic(), False
    while missing := [number for number, name in enumerate(names) if not store.check([name])]:
        waited_s = time.monotonic() - began
        late = f"worker{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        have = "have" if len(missing) > 1 else "has"
        if waited_s > timeout_s:
            raise LaunchError(
                f"{late} {have} not come to paceline.run() within {timeout_s:.0f} s (timeout_s): look at what the "
                "script does before it on that worker, and whether it was started at all"
            )
        if not is_told and waited_s > LATE_S:
            is_told = True
            log(f"{late} {have} not come to paceline.run() yet; the others have waited {waited_s:.0f} s")
        time.sleep(MEET_S)  # the store's own wait does not name the missing ones


def await_records_closed(store: dist.Store, own: Assignment) -> None:
    """Return when worker 0, which closes the records of all, has come here; it may have exited already."""
    with contextlib.suppress(RuntimeError, PacelineError, ConnectionError):  # RuntimeError: of torch's own stores
        if own.rank == 0:
            store.set(RECORDS, "")
        else:
            store.wait([RECORDS], timedelta(seconds=RECORDS_S))


def _assignment(
    world: World, job: Job, command_started: float, *, run_dir: str, attempt: int, hosts: Sequence[str]
) -> Assignment:
    one_host = world.local_workers == world.workers
    names = list(dict.fromkeys(hosts))  # in the order of their first workers
    host = socket.gethostname()
    return Assignment(
        rank=world.worker_rank,
        workers=world.workers,
        local_rank=world.local_rank,
        local_workers=world.local_workers,
        host=host,
        host_index=names.index(host),
        hosts=len(names),
        address="127.0.0.1" if one_host else own_address(_rendezvous_host(world), is_head=world.worker_rank == 0),
        run_dir=run_dir,
        attempt=attempt,
        worker_dir=str(Path(run_dir) / f"attempt_{attempt}" / f"worker_{world.worker_rank}"),
        channel_fd=-1,
        command_started=command_started,
        job=dataclasses.replace(job, run_dir=run_dir, workers=world.workers),
    )


@contextlib.contextmanager
def _store(world: World, job: Job, call: int, log: Callable[[str], None]) -> Iterator[dist.Store]:
    one_host = world.local_workers == world.workers
    is_open = job.private_network and not environment.has_token(job) and _has_torch_store(world)
    token = None if one_host or is_open else environment.token(job)
    torchs = _torch_store(world, job) if not one_host and _has_torch_store(world) else None
    if torchs is not None and is_open:
        yield torchs
        return
    publish: Callable[[int], None] | None = None
    address: str | tuple[str, int]
    if one_host:
        address = _name(world, call)
    elif torchs is None:
        address = _rendezvous_host(world, call)
    else:  # torchrun listens at MASTER_PORT itself
        key = f"paceline_port_{call}"
        publish = functools.partial(_publish, torchs, key)
        address = _rendezvous_host(world)[0], 0 if world.worker_rank == 0 else _port(torchs, key, job)
    with contextlib.ExitStack() as stack:
        channel, server = join_external_launch(
            worker_rank=world.worker_rank,
            address=address,
            token=token,
            timeout_s=job.timeout_s,
            log=log,
            publish=publish,
        )
        if server is not None:
            stack.callback(server.close)
        stack.callback(channel.close)
        yield SupervisorStore(channel, timeout_s=job.timeout_s)


def _has_torch_store(world: World) -> bool:
    """Whether torchrun itself has started this world; one made by hand has no store."""
    return world.source == "torchrun" and bool(world.job_id)


def _torch_store(world: World, job: Job) -> dist.Store:
    """torchrun's own store, which runs already or is left to worker 0: torch knows which."""
    limit = timedelta(seconds=job.timeout_s)
    store, _, _ = next(iter(dist.rendezvous("env://", world.worker_rank, world.workers, timeout=limit)))
    return store


def _publish(store: dist.Store, key: str, port: int) -> None:
    store.set(key, str(port))


def _port(store: dist.Store, key: str, job: Job) -> int:
    """Read worker 0's port in a store to which any process may write: who listens there has to prove the token."""
    store.wait([key], timedelta(seconds=job.timeout_s))
    text = store.get(key)
    if not (text.isdigit() and len(text) <= 5 and 0 < int(text) < 1 << 16):
        raise LaunchError(
            f"torchrun's store says that the workers meet at port {text[:40]!r}: another program writes to that store"
        )
    return int(text)


def _name(world: World, call: int) -> str:
    """A Unix socket's name without a file, the same for all workers of this world and for no other one."""
    # A job without an id (MPICH): what its workers on this host have in common is the process that started them.
    job_id = world.job_id or (world.head_port if world.source == "torchrun" else os.getppid())
    told = f"{job_id} {world.head_port} {environment.engine_restart()}"
    return f"\0paceline-{os.getuid()}-{world.source}-{hashlib.sha256(told.encode()).hexdigest()[:16]}-{call}"


def _rendezvous_host(world: World, call: int = 0) -> tuple[str, int]:
    if world.head is None:
        raise LaunchError(
            f"{world.source} started {world.workers} workers on several hosts, but does not say where worker 0 is. "
            "Set MASTER_ADDR (and MASTER_PORT) to its host for all workers"
        )
    return world.head, (world.head_port or rendezvous_port(world.job_id)) + call


def started_at() -> float:
    """When this process began (time.time()), for the start-up time of a world that another launcher started."""
    ticks = (
        int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        if Path("/proc/self/stat").exists()
        else 0
    )
    if not ticks:
        return time.time()
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
