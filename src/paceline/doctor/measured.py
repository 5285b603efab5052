"""What was measured, as plain data: of each worker, of each pair of hosts, of collectives among all workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

__all__ = [
    "CollectiveTime",
    "Examination",
    "HostPair",
    "ReadingRate",
    "ScriptReading",
    "ShardingTime",
    "WorkerRates",
    "bus_bandwidth",
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRates:
    """One worker, with all others at work at the same time. Bytes and operations are per second.

    `matmul` by precision, in operations; `attention` of fused attention, forward and backward, causal, skipped pairs
    not counted. `launch_s`: for one operation on a few elements. `memory`: bytes that it may take, of
    which a process without a model takes `runtime`. `disk_write` and
    `disk_read`: of a file in the run's directory. `interface` is that of the address at which peers reach this host;
    `interface_rate` its bytes per second, where the kernel knows it. `cores`: of its host, that its workers share.
    """

    rank: int
    host: str
    device: str  # "cpu", or the accelerator's name
    threads: int
    cores: int
    memory: float
    runtime: float
    matmul: Mapping[str, float]
    memory_bandwidth: float
    attention: float
    launch_s: float
    disk_write: float
    disk_read: float
    interface: str
    interface_rate: float | None
    faster_interface: str | None  # another one of this host that is up and at least twice as fast


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostPair:
    """Two hosts, over TCP: seconds from one to the other, bytes per second, and how far the second's clock is ahead.
    `address`: at which the first has tried to reach the second.
    """

    first: str
    second: str
    address: str
    latency_s: float | None
    bandwidth: float | None
    clock_ahead_s: float | None
    error: str | None  # why they could not be measured


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """One all-reduce among all workers, the median of several."""

    num_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardingTime:
    """What a unit of a model with `num_bytes` of parameters adds to a step where it is split by rows: each time that it
    is gathered, and each time that its gradients are summed.
    """

    num_bytes: int
    gather_s: float
    sum_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadingRate:
    """How fast one worker gets its micro-batches of a script, with all others reading at the same time.

    `bytes_per_sample`: of its tensors; `stored_per_sample`: read from files, the cache included. `busy_cores`: what one
    of the processes that read keeps busy; one that waits for a disk needs less than a core. `first_s`: until the first
    micro-batch was there. `loaders` and `prefetch`: the script's own.
    """

    samples_per_s: float
    bytes_per_sample: float
    stored_per_sample: float
    busy_cores: float
    first_s: float
    loaders: int
    prefetch: int
    is_iterable: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScriptReading:
    """A script's data. `rates` by worker; where that could not be measured it is empty, and `problem` says why.

    `appetite`: samples per second that each worker's steps take, as predicted for `plan` on this cluster, with data
    that is there at once; None where `no_appetite` says why it is not known.
    """

    script: str
    rates: Sequence[ReadingRate]
    problem: str | None
    plan: str = ""
    appetite: float | None = None
    no_appetite: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All of it; `took_s`: its seconds. `host_link`: bytes per second (busbw) of an all-reduce among the workers of a
    host, of several hosts; None on one host, and where hosts have one worker each.
    `sync_wait_s`: how long workers wait for each other after a millisecond of work, on CPUs. There
    `gathers` and `reduce_scatters` are those of torch.distributed, which tensor-parallel workers use, and `sharding`
    is of a model's units.
    """

    workers: Sequence[WorkerRates]
    hosts: int
    pairs: Sequence[HostPair]
    all_reduce: Sequence[CollectiveTime]
    took_s: float
    torch: str
    host_link: float | None = None
    sync_wait_s: float | None = None
    gathers: Sequence[CollectiveTime] = ()
    reduce_scatters: Sequence[CollectiveTime] = ()
    sharding: Sequence[ShardingTime] = ()

    @property
    def per_host(self) -> int:
        return -(-len(self.workers) // self.hosts)

    @property
    def network_rate(self) -> float | None:
        """Bytes per second of a host's network in the largest all-reduce, in which 2 (h - 1) / h of the tensor's bytes
        enter each of h hosts. None with one host.
        """
        if self.hosts < 2 or not self.all_reduce:
            return None
        largest = max(self.all_reduce, key=lambda one: one.num_bytes)
        return 2 * (self.hosts - 1) / self.hosts * largest.num_bytes / largest.seconds

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second of the largest all-reduce by which algorithms are compared. None with one worker."""
        if len(self.workers) < 2 or not self.all_reduce:
            return None
        largest = max(self.all_reduce, key=lambda one: one.num_bytes)
        return bus_bandwidth(largest.num_bytes, largest.seconds, len(self.workers))


def bus_bandwidth(num_bytes: int, seconds: float, workers: int) -> float:
    """Return bytes per second of an all-reduce: 2 (n - 1) / n of the tensor's bytes pass each worker's link (nccl-tests
    call it busbw). 0 of one worker.
    """
    return 2 * (workers - 1) / workers * num_bytes / seconds
