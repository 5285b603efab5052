"""Which parameter lies on which of several servers: a pure function of names and sizes, the same on every worker.

Whole parameters are placed, so that a server may run any optimizer that looks at one parameter at a time, matrices and
norms included. The largest goes first, each to the server that has the least so far (Graham 1969: at most 4/3 of the
best that whole parameters allow). Tables of which only the rows that a step touches move are the exception: of each
all servers have rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["in_turn", "placed_on", "rows_on"]


def placed_on(num_bytes: Mapping[str, int], *, servers: int) -> dict[str, int]:
    """Return the server of each parameter, in the order of `num_bytes`; ties are decided by names."""
    if servers < 1:
        raise ValueError(f"servers is {servers}; there must be at least 1")
    loads, chosen = [0] * servers, dict[str, int]()
    for name in sorted(num_bytes, key=lambda one: (-num_bytes[one], one)):
        chosen[name] = server = min(range(servers), key=lambda one: (loads[one], one))
        loads[server] += num_bytes[name]
    return {name: chosen[name] for name in num_bytes}


def in_turn(hosts: Sequence[int]) -> list[int]:
    """Return workers in the order in which they start servers, worker k being on host `hosts[k]`: the first one of each
    host, then the second ones, so that few servers are on many hosts, and no host's cable carries what all get."""
    seen: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for worker, host in enumerate(hosts):
        places.append((seen.get(host, 0), worker))
        seen[host] = seen.get(host, 0) + 1
    return [worker for _, worker in sorted(places)]


def rows_on(server: int, *, servers: int) -> slice:
    """Return which rows of a table a server has: row r is on server r mod n, as row r div n there.

    In turns, because words are often numbered by how frequent they are: blocks would give the first server the work.
    """
    if not 0 <= server < servers:
        raise ValueError(f"server is {server}; it must be from 0 to {servers - 1}")
    return slice(server, None, servers)
