"""Which devices of a pool are in use, and by which run, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.units import printable

__all__ = ["devices_of"]

MOST_NODES = 1000
HERE, LEFT = "here", "left"  # states of a node
MOST_SLOTS = 1_000_000
MOST_NAME = 100


def devices_of(record: Mapping[str, Any], held: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return `name`, `slots`, whether it is there (`is_here`) and `holders` (`run` and `devices`) of each node.

    `record` is the pool's; `held` has the devices of each run. A pool of one machine has no nodes in its record, and is
    shown as one. What a run has on no known node is put where there is room, so that the sum is right.
    """
    nodes = _nodes(record)
    holders: dict[str, Counter[str]] = {node["name"]: Counter() for node in nodes}
    free = {node["name"]: node["slots"] for node in nodes}
    unplaced: list[tuple[str, int]] = []
    for run, devices in held.items():
        placed = 0
        for node, count in _places(record, run):
            if node in holders and placed < devices:
                count = min(count, devices - placed)
                holders[node][run] += count
                free[node] -= count
                placed += count
        unplaced.append((run, devices - placed))
    for run, devices in unplaced:
        for place, node in enumerate(nodes):
            is_last = place + 1 == len(nodes)
            count = devices if is_last else min(devices, max(0, free[node["name"]]))
            if count > 0:
                holders[node["name"]][run] += count
                free[node["name"]] -= count
                devices -= count
    return [
        node | {"holders": [{"run": run, "devices": count} for run, count in holders[node["name"]].items()]}
        for node in nodes
    ]


def _nodes(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = record.get("nodes")
    named = list(found.items()) if isinstance(found, dict) else []
    nodes = [
        {"name": printable(str(name))[:MOST_NAME], "slots": _slots(one), "is_here": _is_here(one)}
        for name, one in named[:MOST_NODES]
        if not (isinstance(one, dict) and one.get("state") == LEFT)
    ]
    if nodes:
        return nodes
    host = record.get("host")
    name = host if isinstance(host, str) and host else "this machine"
    return [{"name": printable(name)[:MOST_NAME], "slots": _count(record.get("slots")), "is_here": True}]


def _slots(node: object) -> int:
    """A node is written as its number of devices, or as an object that has it."""
    return _count(node.get("slots")) if isinstance(node, dict) else _count(node)


def _is_here(node: object) -> bool:
    return not isinstance(node, dict) or node.get("state", HERE) == HERE


def _places(record: Mapping[str, Any], run: str) -> Iterator[tuple[str, int]]:
    """Devices of a run by node: its `parts`, of so many replicas each."""
    runs = record.get("runs")
    entry = runs.get(run) if isinstance(runs, dict) else None
    parts = entry.get("parts") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(parts, dict):
        return
    each = max(1, _count(entry.get("workers_each")))
    for node, part in parts.items():
        if isinstance(part, dict):
            yield printable(str(node))[:MOST_NAME], _count(part.get("replicas")) * each


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value <= MOST_SLOTS else 0
