"""Hierarchical: inside each host first, then between the hosts, then inside again.

The links between hosts are slower than those within a host, and shared by all of its workers. So the tensor is split
into as many slices as the smallest host has workers. The first workers of each host take a slice each. Each of them
reduces its slice within the host, then with the workers of the same slice on the other hosts, and sends the result to
the other workers of its host. Each of h hosts then sends 2 (h-1)/h of the tensor, however many workers it has. If a
host has only one worker, the first worker of each host is its leader, which sends for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.schedule.allreduce.rounds import Round, Send, bounds, merged, relabelled

__all__ = ["hierarchical", "hosts_of", "slices_of"]


def hierarchical(
    hosts: Sequence[int], num_chunks: int, *, between: Callable[[int, int], Iterator[Round]]
) -> Iterator[Round]:
    """Yield the rounds; `hosts[w]` is the host of worker w, and `between` the algorithm that hosts use."""
    host_members = hosts_of(hosts)
    slices = slices_of(host_members, num_chunks)
    yield from merged([list(_reduce_to_owners(members, slices)) for members in host_members])
    across = [
        relabelled(between(len(host_members), stop - first), [members[place] for members in host_members], first)
        for place, (first, stop) in enumerate(slices)
        if stop > first
    ]
    yield from merged(across)
    yield from merged([list(_broadcast_from_owners(members, slices)) for members in host_members])


def hosts_of(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the workers of each host, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for worker, host in enumerate(hosts):
        found.setdefault(host, []).append(worker)
    return tuple(map(tuple, found.values()))


def slices_of(host_members: Sequence[Sequence[int]], num_things: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of the slices: as many as the smallest host has workers."""
    num_slices = min(map(len, host_members))
    return tuple(bounds(num_things, num_slices, place) for place in range(num_slices))


def _reduce_to_owners(members: Sequence[int], slices: Sequence[tuple[int, int]]) -> Iterator[Round]:
    """Every worker sends its part of each slice to the slice's owner: in each round to another owner."""
    for distance in range(1, len(members)):
        sends: list[Send] = []
        for place, worker in enumerate(members):
            owner = (place + distance) % len(members)
            if owner < len(slices) and slices[owner][0] < slices[owner][1]:
                sends.append(Send(worker, members[owner], *slices[owner], True))
        yield tuple(sends)


def _broadcast_from_owners(members: Sequence[int], slices: Sequence[tuple[int, int]]) -> Iterator[Round]:
    """The owner of each slice sends it to all other workers of the host."""
    for distance in range(1, len(members)):
        sends: list[Send] = []
        for owner, (first, stop) in enumerate(slices):
            if first < stop:
                sends.append(Send(members[owner], members[(owner + distance) % len(members)], first, stop, False))
        yield tuple(sends)
