"""Seconds of collectives of a group whose members share hosts, and that all hosts' groups run at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from paceline.planner.cluster import Cluster
from paceline.planner.constants import Constants
from paceline.schedule.allreduce.cost_model import LinkCost, NetworkCost, predict

__all__ = ["Parted", "exchange_s", "gather_s", "latency_s", "sum_s"]

FOLLOWED = 64  # workers of a schedule that is followed send by send
Parted = Literal["sum", "gather", "scatter"]
FREE = 1e18  # a rate that costs nothing
TENSOR_BYTES = 1 << 20  # followed, and in proportion


def latency_s(cluster: Cluster, constants: Constants) -> float:
    """Seconds of a collective beyond its bytes, for each doubling of its members: the cluster's own if measured."""
    return constants.latency if cluster.device.latency is None else cluster.device.latency


def gather_s(
    num_bytes: float, members: int, inside: int, cluster: Cluster, constants: Constants, *, of: Parted = "sum"
) -> float:
    """Seconds of an all-gather or a reduce-scatter of `num_bytes` in all among `members`, `inside` of them on a host.

    Each host receives what its members lack, once, and spreads it over its links: (n - 1) / n of the bytes reach each
    member, (h - 1) / h of them each of h hosts. Groups of one host share its network. An all-reduce is two of these.
    `of`: half of an all-reduce, or an all-gather or a reduce-scatter by itself, which may have rates of their own.
    """
    if members <= 1:
        return 0.0
    hosts = members / inside
    device = cluster.device
    own = {"gather": device.gather, "scatter": device.scatter}.get(of)
    local = num_bytes * (members - 1) / members / (own or device.link * constants.link)
    groups = cluster.devices_per_host / inside
    network = cluster.network * constants.network
    remote = num_bytes * (hosts - 1) / hosts * groups / network if hosts > 1 else 0.0
    waiting = latency_s(cluster, constants) * (math.log2(members) + 1)
    if own is not None and device.gather_latency is not None:
        waiting = max(waiting, device.gather_latency)
    return max(local, remote) + waiting


def exchange_s(num_bytes: float, members: int, inside: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-to-all in which each member sends `num_bytes`, evenly to all."""
    if members <= 1:
        return 0.0
    away = (members - inside) / members
    local = num_bytes * (inside - 1) / members / (cluster.device.link * constants.link)
    remote = num_bytes * away * cluster.devices_per_host / (cluster.network * constants.network)
    return max(local, remote) + latency_s(cluster, constants) * (math.log2(members) + 1)


def sum_s(
    num_bytes: float, members: int, inside: int, cluster: Cluster, constants: Constants, *, algorithm: str
) -> float:
    """Seconds of an all-reduce by an algorithm of `paceline.schedule.allreduce`; "auto" is the fastest for the cluster.

    What the named ones load links with is read off the schedules that are executed.
    """
    if algorithm == "auto" or members <= 1:
        return 2 * gather_s(num_bytes, members, inside, cluster, constants)
    loads = _loads(algorithm, max(1, members // inside), inside)
    local = num_bytes * loads.local / (cluster.device.link * constants.link)
    groups = cluster.devices_per_host / inside
    remote = num_bytes * loads.remote * groups / (cluster.network * constants.network)
    return max(local, remote) + latency_s(cluster, constants) * loads.rounds


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Loads:
    """Of an all-reduce: how many tensors pass a worker's link within its host, and a host's network, and how many sends
    follow each other.
    """

    local: float
    remote: float
    rounds: float


@functools.lru_cache(maxsize=256)
def _loads(algorithm: str, hosts: int, inside: int) -> _Loads:
    """Follow the schedule, of up to 64 workers; with more, links are loaded alike, and what is added are rounds: of a
    ring two for each worker, otherwise two for each doubling.
    """
    fewer_inside = min(inside, FOLLOWED)
    fewer = min(hosts, max(1, FOLLOWED // fewer_inside))
    workers, followed = hosts * inside, fewer * fewer_inside
    homes = tuple(worker // fewer_inside for worker in range(followed))
    free, counted = LinkCost(latency_s=0.0, bytes_per_s=FREE), LinkCost(latency_s=0.0, bytes_per_s=TENSOR_BYTES)
    late = LinkCost(latency_s=1.0, bytes_per_s=FREE)

    def followed_s(between: LinkCost, within: LinkCost, num_bytes: int = TENSOR_BYTES) -> float:
        network = NetworkCost(hosts=homes, between=between, inside=within, adds_bytes_per_s=FREE)
        return predict(algorithm, num_bytes=num_bytes, network=network)

    more = 2.0 * (workers - followed) if algorithm == "ring" else 2 * math.log2(workers / followed)
    rounds = followed_s(late, late, num_bytes=followed) + more
    return _Loads(local=followed_s(free, counted), remote=followed_s(counted, free), rounds=rounds)
