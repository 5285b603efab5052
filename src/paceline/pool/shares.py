"""How a run gets from the replicas that it has on each node to those that it should have: pure functions.

*Shares* are the replicas of a run by node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["first_nodes", "free_gpus", "next_shares", "shares_of", "shares_text", "startable"]


def shares_of(places: Sequence[str], workers_each: int) -> dict[str, int]:
    """Return the replicas by node, where `places` names the node of each worker: a replica is on one node."""
    found = {node: places.count(node) // workers_each for node in dict.fromkeys(places)}
    return {node: replicas for node, replicas in found.items() if replicas}


def startable(target: Mapping[str, int], free: Mapping[str, int], *, least: int, workers_each: int) -> dict[str, int]:
    """Return the shares with which a run starts: those of nodes that have free devices for them now; none where these
    are fewer than `least`.
    """
    found = {node: share for node, share in target.items() if share * workers_each <= free.get(node, 0)}
    return found if sum(found.values()) >= least else {}


def first_nodes(shares: Mapping[str, int], least: int) -> dict[str, int]:
    """Return the shares of the nodes on which an elastic run begins: as few as make up `least`. The others join it."""
    found: dict[str, int] = {}
    for node in sorted(shares, key=lambda node: (-shares[node], node)):
        if sum(found.values()) >= least:
            break
        found[node] = shares[node]
    return found


def next_shares(
    now: Mapping[str, int],
    target: Mapping[str, int],
    present: Mapping[str, int],
    free: Mapping[str, int],
    *,
    least: int,
    workers_each: int,
) -> dict[str, int]:
    """Return the shares that a run gets next. `present`: replicas that are at work on each node; `free`: devices there.

    It gives what it should give, unless fewer than `least` replicas would be left at work until those that come are
    there. It takes what is free, on each node all that it should take or nothing.
    """
    fewer = {node: min(share, target.get(node, 0)) for node, share in now.items()}
    staying = sum(min(share, present.get(node, 0)) for node, share in fewer.items())
    found = fewer if staying >= least else dict(now)
    for node, share in target.items():
        more = share - found.get(node, 0)
        if 0 < more * workers_each <= free.get(node, 0):
            found[node] = share
    return {node: share for node, share in found.items() if share}


def free_gpus(gpus: Sequence[str] | None, taken: Sequence[str], count: int) -> tuple[str, ...] | None:
    """Return the first `count` GPUs of a node that no run has; None for a node without any."""
    if gpus is None:
        return None
    return tuple(gpu for gpu in gpus if gpu not in taken)[:count]


def shares_text(shares: Mapping[str, int]) -> str:
    """Say on which nodes replicas are: "n1 (2), n2 (1)"."""
    return ", ".join(f"{node} ({share})" for node, share in sorted(shares.items()))
