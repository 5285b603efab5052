"""Seconds of collectives of a group whose members share hosts, and that all hosts' groups run at once."""

from __future__ import annotations

import math

from paceline.planner.cluster import Cluster
from paceline.planner.constants import Constants

__all__ = ["exchange_s", "gather_s", "latency_s"]


def latency_s(cluster: Cluster, constants: Constants) -> float:
    """Seconds of a collective beyond its bytes, for each doubling of its members: the cluster's own if measured."""
    return constants.latency if cluster.device.latency is None else cluster.device.latency


def gather_s(num_bytes: float, members: int, inside: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-gather or a reduce-scatter of `num_bytes` in all among `members`, `inside` of them on a host.

    Each host receives what its members lack, once, and spreads it over its links: (n - 1) / n of the bytes reach each
    member, (h - 1) / h of them each of h hosts. Groups of one host share its network. An all-reduce is two of these.
    """
    if members <= 1:
        return 0.0
    hosts = members / inside
    local = num_bytes * (members - 1) / members / (cluster.device.link * constants.link)
    groups = cluster.devices_per_host / inside
    network = cluster.network * constants.network
    remote = num_bytes * (hosts - 1) / hosts * groups / network if hosts > 1 else 0.0
    return max(local, remote) + latency_s(cluster, constants) * (math.log2(members) + 1)


def exchange_s(num_bytes: float, members: int, inside: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-to-all in which each member sends `num_bytes`, evenly to all."""
    if members <= 1:
        return 0.0
    away = (members - inside) / members
    local = num_bytes * (inside - 1) / members / (cluster.device.link * constants.link)
    remote = num_bytes * away * cluster.devices_per_host / (cluster.network * constants.network)
    return max(local, remote) + latency_s(cluster, constants) * (math.log2(members) + 1)
