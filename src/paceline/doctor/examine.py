"""What an examination measures: each worker by itself, pairs of hosts, collectives; all workers at the same time."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.comm.group import Group, SingleWorkerGroup, WorkerGroup
from paceline.comm.shared_memory.setup import with_shared_memory
from paceline.doctor.host_pairs import HostEnd, interface_of, rounds
from paceline.doctor.measured import CollectiveTime, Examination, HostPair, WorkerRates, bus_bandwidth
from paceline.doctor.meeting import Meeting
from paceline.doctor.rates import attention_rate, launch_s, matmul_rates, memory_bandwidth, train_once
from paceline.doctor.sharding_times import sharding_times
from paceline.doctor.storage import disk_rates
from paceline.doctor.sync_waits import sync_wait_s
from paceline.host_memory import memory_limit_bytes
from paceline.plan.job import Assignment
from paceline.worker.run_member import parts_of
from paceline.worker.topology.device import peak_memory_bytes

__all__ = ["examine", "examine_apart", "host_pairs"]

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes of an all-reduce
PARTED = (1 << 12, 1 << 24)  # bytes of a tensor that is gathered, or summed and scattered
REPEATS = 7


def examine(worker: paceline.Worker, *, seconds: float, pairs: Sequence[HostPair] | None = None) -> Examination:
    """Measure with all workers of a run; `seconds` is the length of each single test. All return the same. `pairs`:
    of hosts, where they were measured before.
    """
    began = time.monotonic()
    assignment = parts_of(worker).files.assignment
    own = _own_rates(assignment, worker.device, worker, seconds=seconds)
    collectives = _all_reduces(worker)
    link = _host_link(worker, assignment)
    workers = _with_disks(worker, assignment, own, seconds=seconds)
    if pairs is None:
        pairs = host_pairs(worker, assignment, seconds=seconds) if assignment.hosts > 1 else []
    found = _examination(assignment, workers, pairs, collectives, link, began)
    gathers, scatters = _gathers(worker)
    return dataclasses.replace(
        found,
        sync_wait_s=sync_wait_s(worker),
        gathers=gathers,
        reduce_scatters=scatters,
        sharding=sharding_times(worker),
    )


def examine_apart(
    meeting: Meeting, assignment: Assignment, device: torch.device, *, seconds: float, pairs: Sequence[HostPair]
) -> Examination:
    """Measure what can be measured where workers cannot all reach each other: all but collectives."""
    began = time.monotonic()
    own = _own_rates(assignment, device, meeting, seconds=seconds)
    return _examination(assignment, _with_disks(meeting, assignment, own, seconds=seconds), pairs, [], None, began)


def host_pairs(meeting: Meeting, assignment: Assignment, *, seconds: float) -> list[HostPair]:
    """Measure each pair of hosts once, by the first worker of each host, while the others wait. All return the same."""
    secret = bytes.fromhex(meeting.gather(secrets.token_hex(32) if assignment.rank == 0 else "")[0])
    end = HostEnd(assignment.host, assignment.address, secret) if assignment.local_rank == 0 else None
    found: list[HostPair] = []
    try:
        told = (assignment.host_index, assignment.host, assignment.address, end.port) if end is not None else None
        ends = {one[0]: one[1:] for one in meeting.gather(told) if one is not None}
        order = sorted(ends)
        for pairs in rounds(len(order)):
            for first, second in ((order[a], order[b]) for a, b in pairs):
                if end is not None and assignment.host_index == first:
                    name, address, port = ends[second]
                    found.append(end.measure(name, address, port, seconds=seconds))
                elif end is not None and assignment.host_index == second:
                    end.answer()
            meeting.wait()
    finally:
        if end is not None:
            end.close()
    return [HostPair(**pair) for part in meeting.gather([dataclasses.asdict(one) for one in found]) for pair in part]


def _own_rates(assignment: Assignment, device: torch.device, meeting: Meeting, *, seconds: float) -> WorkerRates:
    """What this worker can do while the others do the same; its disk is still to come."""
    train_once(device)
    runtime = float(peak_memory_bytes(device))

    def together(measure: Callable[..., Any], length_s: float) -> Any:
        meeting.wait()
        return measure(device, seconds=length_s)

    interface, rate, faster = interface_of(assignment.address)
    return WorkerRates(
        rank=assignment.rank,
        host=assignment.host,
        device=device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        memory=_memory(device, assignment.local_workers),
        runtime=runtime,
        matmul=together(matmul_rates, seconds),
        memory_bandwidth=together(memory_bandwidth, seconds),
        attention=together(attention_rate, seconds),
        launch_s=together(launch_s, seconds / 2),
        disk_write=0.0,
        disk_read=0.0,
        interface=interface,
        interface_rate=rate,
        faster_interface=faster,
    )


def _with_disks(meeting: Meeting, assignment: Assignment, own: WorkerRates, *, seconds: float) -> list[WorkerRates]:
    """Return all workers, with the rates of their hosts' disks, which the first worker of each host measures."""
    disk = (0.0, 0.0)
    if assignment.local_rank == 0:
        disk = disk_rates(Path(assignment.worker_dir), name="doctor.disk", seconds=seconds)
    told = (assignment.host_index, assignment.local_rank, disk, dataclasses.asdict(own))
    gathered = meeting.gather(told)
    disks = {host: disk for host, local, disk, _ in gathered if local == 0}
    return [
        WorkerRates(**{**one, "disk_write": disks[host][0], "disk_read": disks[host][1]})
        for host, _, _, one in gathered
    ]


def _examination(
    assignment: Assignment,
    workers: Sequence[WorkerRates],
    pairs: Sequence[HostPair],
    collectives: Sequence[CollectiveTime],
    link: float | None,
    began: float,
) -> Examination:
    return Examination(
        workers=workers,
        hosts=assignment.hosts,
        pairs=pairs,
        all_reduce=collectives,
        host_link=link,
        took_s=time.monotonic() - began,
        torch=torch.__version__,
    )


def _all_reduces(worker: paceline.Worker) -> list[CollectiveTime]:
    """All-reduces of the run's own group, as its gradients take them."""
    if worker.workers == 1:
        return []
    group = parts_of(worker).place.group
    found: list[CollectiveTime] = []
    for num_bytes in SIZES:
        slowest = max(worker.gather(_all_reduce_s(worker, group, num_bytes)))
        found.append(CollectiveTime(num_bytes=num_bytes, seconds=slowest))
    return found


def _gathers(worker: paceline.Worker) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """All-gathers and reduce-scatters of whole tensors of some sizes, on CPUs; elsewhere one library does all."""
    gathers: list[CollectiveTime] = []
    scatters: list[CollectiveTime] = []
    if worker.workers == 1 or worker.device.type != "cpu":
        return gathers, scatters
    for num_bytes in PARTED:
        part = torch.ones(num_bytes // 4 // worker.workers)
        whole = torch.ones(part.numel() * worker.workers)
        for found, collective in (
            (gathers, functools.partial(dist.all_gather_into_tensor, whole, part)),
            (scatters, functools.partial(dist.reduce_scatter_tensor, part, whole)),
        ):
            slowest = max(worker.gather(_typical_s(worker, collective)))
            found.append(CollectiveTime(num_bytes=num_bytes, seconds=slowest))
    return gathers, scatters


def _typical_s(worker: paceline.Worker, call: Callable[[], object]) -> float:
    """The median time of a call that all workers make at once, of those after the first."""
    times: list[float] = []
    for _ in range(REPEATS):
        worker.wait()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _host_link(worker: paceline.Worker, assignment: Assignment) -> float | None:
    """Bytes per second of a worker's link to those of its own host (busbw), in an all-reduce among them while all other
    hosts do the same; the least of all hosts. None on one host, where that is the run's own all-reduce, and where no
    host has two workers.
    """
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(worker.gather(assignment.host_index)):
        hosts.setdefault(host, []).append(rank)
    if len(hosts) < 2 or max(map(len, hosts.values())) < 2:
        return None
    made: dict[int, Any] = {host: dist.new_group(ranks) for host, ranks in hosts.items()}  # all workers make all
    own = hosts[assignment.host_index]
    group: WorkerGroup = SingleWorkerGroup()
    if len(own) > 1:
        group = Group(made[assignment.host_index], device=worker.device)
        if worker.device.type == "cpu":
            timeout_s = parts_of(worker).timeout_s
            group, _ = with_shared_memory(group, timeout_s=timeout_s, num_local_workers=len(own), ranks=own)
    found = _all_reduce_s(worker, group, SIZES[-1])
    group.close()
    rates = worker.gather(bus_bandwidth(SIZES[-1], found, len(own)))
    return min(rate for rate in rates if rate > 0)


def _all_reduce_s(worker: paceline.Worker, group: WorkerGroup, num_bytes: int) -> float:
    """The median time on this worker, of those after the first."""
    tensor = torch.ones(num_bytes // 4, device=worker.device)
    times: list[float] = []
    for _ in range(REPEATS):
        worker.wait()
        started = time.perf_counter()
        group.all_reduce(tensor, what="doctor").wait()
        if worker.device.type != "cpu":
            torch.cuda.synchronize(worker.device)
        times.append(time.perf_counter() - started)
        tensor.fill_(1.0)
    return statistics.median(times[1:])


def _memory(device: torch.device, local_workers: int) -> float:
    if device.type != "cpu":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(memory_limit_bytes() or 0) / local_workers
