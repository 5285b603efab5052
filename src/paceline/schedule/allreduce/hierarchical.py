"""Hierarchical: inside each host first, then between the hosts, then inside again.

The links between hosts are slower than those inside, and shared by all workers of a host. So the tensor is cut into as
many slices as the smallest host has workers. The first workers of each host take a slice each: they add up what their
neighbours have of it, sum it with those who have the same slice on the other hosts, and give it to their neighbours.
Each host then sends 2 (h-1)/h of the tensor for h hosts, however many workers it has. Where a host has one worker, the
first of each host is its leader, who sends for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.schedule.allreduce.rounds import Round, Send, bounds, merged, relabelled

__all__ = ["hierarchical", "hosts_of", "slices_of"]


def hierarchical(
    hosts: Sequence[int], num_chunks: int, *, between: Callable[[int, int], Iterator[Round]]
) -> Iterator[Round]:
    """Yield the rounds; `hosts[w]` is the host of worker w, and `between` the algorithm that hosts use."""
    teams = hosts_of(hosts)
    slices = slices_of(teams, num_chunks)
    yield from merged([list(_gathered(team, slices)) for team in teams])
    across = [
        relabelled(between(len(teams), stop - first), [team[place] for team in teams], first)
        for place, (first, stop) in enumerate(slices)
        if stop > first
    ]
    yield from merged(across)
    yield from merged([list(_spread(team, slices)) for team in teams])


def hosts_of(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the workers of each host, in the order of their first ones."""
    found: dict[int, list[int]] = {}
    for worker, host in enumerate(hosts):
        found.setdefault(host, []).append(worker)
    return tuple(map(tuple, found.values()))


def slices_of(teams: Sequence[Sequence[int]], num_things: int) -> tuple[tuple[int, int], ...]:
    """Return the bounds of the slices: as many as the smallest host has workers."""
    num_slices = min(map(len, teams))
    return tuple(bounds(num_things, num_slices, place) for place in range(num_slices))


def _gathered(team: Sequence[int], slices: Sequence[tuple[int, int]]) -> Iterator[Round]:
    """Everyone gives the owner of each slice what it has of it: in each round to another one."""
    for distance in range(1, len(team)):
        sends: list[Send] = []
        for place, worker in enumerate(team):
            owner = (place + distance) % len(team)
            if owner < len(slices) and slices[owner][0] < slices[owner][1]:
                sends.append(Send(worker, team[owner], *slices[owner], True))
        yield tuple(sends)


def _spread(team: Sequence[int], slices: Sequence[tuple[int, int]]) -> Iterator[Round]:
    """The owner of each slice gives it to everyone."""
    for distance in range(1, len(team)):
        sends: list[Send] = []
        for owner, (first, stop) in enumerate(slices):
            if first < stop:
                sends.append(Send(team[owner], team[(owner + distance) % len(team)], first, stop, False))
        yield tuple(sends)
