"""Cost model of all-reduce schedules: when each send begins and ends on links of a given latency and bandwidth.

A send begins when its data are there, and its sender's port is free. It occupies the port for as long as its bytes
take, arrives a latency later, and takes as long to be received. Between hosts the port is the host's, shared by all its
workers; within a host it is the worker's own. With equal links that gives the formulas of the papers: a ring takes
2 (n-1) (a + m/(n B)) for m bytes, latency a and bandwidth B (Patarasuk and Yuan 2009), halving and doubling
2 a log2 n + 2 (n-1)/n m/B where n is a power of two (Thakur, Rabenseifner and Gropp 2005, section 4.5), two trees about
2 m/B and the way up and down (Sanders, Speck and Traeff 2009, theorem 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.schedule.allreduce.build import build, num_chunks_of
from paceline.schedule.allreduce.rounds import Schedule, Send

__all__ = ["LinkCost", "NetworkCost", "predict", "seconds"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """One way from worker to worker."""

    latency_s: float  # from the first byte sent until it is received
    bytes_per_s: float
    overhead_s: float = 0.0  # of each message, during which the port does nothing else

    def busy_s(self, num_bytes: float) -> float:
        """How long a message takes a port."""
        return self.overhead_s + num_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCost:
    """The links of a job; `hosts[w]` is the host of worker w."""

    hosts: tuple[int, ...]
    between: LinkCost
    inside: LinkCost = dataclasses.field(default_factory=lambda: LinkCost(latency_s=1e-5, bytes_per_s=5e9))
    adds_bytes_per_s: float = 5e9  # at which a worker adds what it has received
    begin_s: float = 0.0  # before the first byte: a sender of gloo waits one latency for the receiver's answer


def predict(name: str, *, num_bytes: int, network: NetworkCost) -> float:
    """Return the seconds that an algorithm takes for a tensor, with its usual number of chunks."""
    num_workers = len(network.hosts)
    num_chunks = num_chunks_of(name, num_bytes=num_bytes, num_workers=num_workers)
    schedule = build(name, num_workers=num_workers, num_chunks=num_chunks, hosts=network.hosts)
    return seconds(schedule, num_bytes=num_bytes, network=network)


def seconds(schedule: Schedule, *, num_bytes: float, network: NetworkCost) -> float:
    """Return the seconds from the first send until the last worker has the sum; ValueError if the network has another
    number of workers than the schedule."""
    if len(network.hosts) != schedule.num_workers:
        raise ValueError(
            f"the network has {len(network.hosts)} workers and the schedule {schedule.num_workers}. Give Network a "
            "host for each worker of the schedule."
        )
    chunk_bytes = num_bytes / schedule.num_chunks
    there = [[0.0] * schedule.num_chunks for _ in range(schedule.num_workers)]  # time of arrival, by worker and chunk
    ports: dict[tuple[str, int, bool], float] = {}  # the time from which a port is free
    last = 0.0  # seconds after the first byte
    for sends in schedule.rounds:
        arrivals = [(send, _arrival(send, there, ports, chunk_bytes, network)) for send in sends]
        for send, arrival in arrivals:
            num_added = (send.stop - send.first) * chunk_bytes if send.adds else 0.0
            done = arrival + num_added / network.adds_bytes_per_s
            there[send.target][send.first : send.stop] = [done] * (send.stop - send.first)
            last = max(last, done)
    return network.begin_s + last


def _arrival(
    send: Send,
    there: Sequence[Sequence[float]],
    ports: dict[tuple[str, int, bool], float],
    chunk_bytes: float,
    network: NetworkCost,
) -> float:
    """Return when a send has been received; the ports of both sides are busy until then."""
    source, target = network.hosts[send.source], network.hosts[send.target]
    is_inside = source == target
    link = network.inside if is_inside else network.between
    out = ("out", send.source if is_inside else source, is_inside)
    into = ("in", send.target if is_inside else target, is_inside)
    busy_s = link.busy_s((send.stop - send.first) * chunk_bytes)
    begin = max(max(there[send.source][send.first : send.stop]), ports.get(out, 0.0))
    ports[out] = begin + busy_s
    arrival = max(begin + link.latency_s, ports.get(into, 0.0)) + busy_s
    ports[into] = arrival
    return arrival
