"""What is wrong with a cluster, by what was measured, and what to do about it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from paceline.doctor.measured import Examination, WorkerRates
from paceline.units import bytes_text, duration_text

__all__ = ["ClusterFinding", "findings"]

SLOW_WORKER, SLOW_PAIR, SLOW_MEMORY = 0.8, 0.5, 0.7  # of the median
LATE = 3.0  # times the median latency
UNUSED = 0.4  # of the interface's rate
SLOW_DISK = 50e6  # bytes per second
CLOCK_S = 0.5  # by which clocks may differ: logs of hosts are compared by them
LITTLE = 2e9  # bytes for a worker


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFinding:
    """`where`: a host, a worker or a pair."""

    where: str
    what: str
    remedy: str


def findings(seen: Examination) -> list[ClusterFinding]:
    """Return what is wrong, hosts that cannot be reached first."""
    return [*_unreachable(seen), *_workers(seen.workers), *_pairs(seen), *_interfaces(seen), *_disks(seen.workers)]


def _unreachable(seen: Examination) -> Iterator[ClusterFinding]:
    interfaces = {one.host: one.interface for one in seen.workers}
    for pair in seen.pairs:
        if pair.error is not None:
            over = f" over {interfaces[pair.first]}" if interfaces.get(pair.first) else ""
            yield ClusterFinding(
                where=f"{pair.first} -> {pair.second}",
                what=f"{pair.address} cannot be reached{over}: {pair.error}",
                remedy=f"Open all TCP ports from {pair.first} to {pair.second} (firewall, security group), or choose "
                "another network by --head.",
            )


def _workers(workers: Sequence[WorkerRates]) -> Iterator[ClusterFinding]:
    kinds: list[tuple[str, Callable[[WorkerRates], float], float]] = [
        *((f"{name} products", lambda one, name=name: one.matmul[name], SLOW_WORKER) for name in workers[0].matmul),
        ("memory", lambda one: one.memory_bandwidth, SLOW_MEMORY),
    ]
    for what, rate, share in kinds:
        middle = statistics.median(rate(one) for one in workers)
        for one in workers:
            if rate(one) < share * middle:
                yield ClusterFinding(
                    where=f"worker {one.rank} ({one.host})",
                    what=f"{what}: {rate(one) / middle * 100:.0f} % of the median worker's rate",
                    remedy="Look for other programs on its host, a lower clock (heat, power), fewer cores for it. "
                    "--balance gives it fewer micro-batches.",
                )
    for one in workers:
        if one.memory < LITTLE:
            yield ClusterFinding(
                where=f"worker {one.rank} ({one.host})",
                what=f"{bytes_text(one.memory)} of memory",
                remedy="Start fewer workers on this host.",
            )


def _pairs(seen: Examination) -> Iterator[ClusterFinding]:
    pairs = [pair for pair in seen.pairs if pair.error is None]
    if not pairs:
        return
    rates = [pair.bandwidth or 0.0 for pair in pairs]
    latencies = [pair.latency_s or 0.0 for pair in pairs]
    rate, latency = statistics.median(rates), statistics.median(latencies)
    for pair, own_rate, own_latency in zip(pairs, rates, latencies, strict=True):
        where = f"{pair.first} - {pair.second}"
        if own_rate < SLOW_PAIR * rate:
            yield ClusterFinding(
                where=where,
                what=f"{own_rate / 1e9:.3g} GB/s, and the median pair {rate / 1e9:.3g}",
                remedy="Look at the cable, the switch port and the negotiated speed of both (ethtool).",
            )
        if own_latency > LATE * latency and own_latency - latency > 5e-5:
            yield ClusterFinding(
                where=where,
                what=f"{duration_text(own_latency)} one way, and the median pair {duration_text(latency)}",
                remedy="They may be behind different switches: place neighbors of a replica together.",
            )
        if abs(pair.clock_ahead_s or 0.0) > CLOCK_S:
            ahead = pair.clock_ahead_s or 0.0
            yield ClusterFinding(
                where=pair.second,
                what=f"its clock is {duration_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} {pair.first}'s",
                remedy="Start time synchronization there (chrony, systemd-timesyncd). Runs go on; their logs mislead.",
            )


def _interfaces(seen: Examination) -> Iterator[ClusterFinding]:
    if seen.hosts < 2:
        return
    rates = [pair.bandwidth for pair in seen.pairs if pair.bandwidth is not None]
    rate = statistics.median(rates) if rates else math.inf  # a wrong interface may be why none could be measured
    for one in {worker.host: worker for worker in seen.workers}.values():
        if one.faster_interface is not None:
            yield ClusterFinding(
                where=one.host,
                what=f"its peers reach it over {one.interface}, and {one.faster_interface} is faster",
                remedy=f"Give --head an address of the network of {one.faster_interface}.",
            )
        elif one.interface_rate is not None and rate < UNUSED * one.interface_rate:
            yield ClusterFinding(
                where=one.host,
                what=f"{rate / 1e9:.3g} GB/s over {one.interface}, which has {one.interface_rate / 1e9:.3g}",
                remedy="Look for other traffic, a small MTU (ip link), and for one CPU that handles all interrupts.",
            )


def _disks(workers: Sequence[WorkerRates]) -> Iterator[ClusterFinding]:
    for one in {worker.host: worker for worker in workers}.values():
        if one.disk_write < SLOW_DISK:
            yield ClusterFinding(
                where=one.host,
                what=f"the run's directory takes {one.disk_write / 1e6:.3g} MB/s",
                remedy="Choose a faster disk with --run-dir: checkpoints are written there.",
            )
