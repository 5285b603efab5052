"""Assigns parameters to parameter servers: a pure function of names and sizes, the same on every worker.

Whole parameters are assigned, so a server can run any optimizer that treats one parameter at a time, including matrices
and norms. The largest come first, each on the server with the least so far (Graham 1969: at most 4/3 of the optimum
with whole parameters). Embedding tables are the exception: all servers have rows of each.
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
    """Return workers in the order in which they start servers, where worker k is on host `hosts[k]`: the first one of
    each host, then the second ones. So servers are spread over hosts, and no host's link carries all traffic."""
    seen: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for worker, host in enumerate(hosts):
        places.append((seen.get(host, 0), worker))
        seen[host] = seen.get(host, 0) + 1
    return [worker for _, worker in sorted(places)]


def rows_on(server: int, *, servers: int) -> slice:
    """Return which rows of a table a server has: row r is on server r mod n, as row r div n there.

    Rows alternate because words are often numbered by frequency: with blocks, the first server would have most work.
    """
    if not 0 <= server < servers:
        raise ValueError(f"server is {server}; it must be from 0 to {servers - 1}")
    return slice(server, None, servers)
