"""Which parameter lies on which of several servers: a pure function of names and sizes, the same on every worker.

Whole parameters are placed, so that a server may run any optimizer that looks at one parameter at a time, matrices and
norms included. The largest goes first, each to the server that has the least so far (Graham 1969: at most 4/3 of the
best that whole parameters allow).
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["load_of", "placed_on"]


def placed_on(num_bytes: Mapping[str, int], *, servers: int) -> dict[str, int]:
    """Return the server of each parameter, in the order of `num_bytes`; ties are decided by names."""
    if servers < 1:
        raise ValueError(f"servers is {servers}; there must be at least 1")
    loads, chosen = [0] * servers, dict[str, int]()
    for name in sorted(num_bytes, key=lambda one: (-num_bytes[one], one)):
        chosen[name] = server = min(range(servers), key=lambda one: (loads[one], one))
        loads[server] += num_bytes[name]
    return {name: chosen[name] for name in num_bytes}


def load_of(num_bytes: Mapping[str, int], places: Mapping[str, int], *, servers: int) -> list[int]:
    """Return how many bytes each server has."""
    loads = [0] * servers
    for name, server in places.items():
        loads[server] += num_bytes[name]
    return loads
