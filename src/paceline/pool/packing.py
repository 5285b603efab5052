"""Which nodes the replicas of each run go to: runs that stay keep theirs, the others get as few nodes as possible."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Gaps", "Worth", "place"]

Worth = Callable[[str, int, int], float]  # of a run on so many nodes with so many replicas, less what the devices cost


class Gaps:
    """Free devices of nodes, by the number that a node has."""

    def __init__(self, free: Mapping[str, int]) -> None:
        self.total = sum(free.values())
        self._nodes: dict[int, list[str]] = {}  # heaps of names
        for node in sorted(free):
            if free[node] > 0:
                self._nodes.setdefault(free[node], []).append(node)

    def num_nodes(self, replicas: int) -> int:
        """Return on how many nodes `take` would put so many replicas."""
        counts = {devices: len(nodes) for devices, nodes in self._nodes.items()}
        used = 0
        while replicas > 0:
            devices = _gap_for(counts, replicas)
            whole = max(1, min(counts[devices], replicas // devices))
            replicas -= whole * devices
            used += whole
            counts[devices] -= whole
        return used

    def take(self, replicas: int) -> list[str]:
        """Take so many devices on as few nodes as possible, and leave large gaps whole where that is no worse."""
        taken: list[str] = []
        while (missing := replicas - len(taken)) > 0:
            devices = _gap_for({size: len(nodes) for size, nodes in self._nodes.items()}, missing)
            node = heapq.heappop(self._nodes[devices])
            count = min(devices, missing)
            taken += [node] * count
            if count < devices:
                heapq.heappush(self._nodes.setdefault(devices - count, []), node)
        self.total -= len(taken)
        return taken


def place(
    sizes: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[str]], nodes: Mapping[str, int], worth: Worth
) -> dict[str, list[str]]:
    """Return the node of each replica. The first of a run's `sizes` is the one that it should have.

    A run whose size does not change stays where it is. The others are placed from the largest to the smallest. Each
    takes the one of its sizes that is worth most in the gaps that are left, so gaps that would spread a run over many
    nodes make it smaller.
    """
    stays = {name for name, choices in sizes.items() if held[name] and len(held[name]) == choices[0]}
    free = dict(nodes)
    for name in stays:
        for node in held[name]:
            free[node] -= 1
    found = {name: list(held[name]) for name in stays}
    gaps = Gaps(free)
    owed = sum(min(choices) for name, choices in sizes.items() if name not in stays)
    for name in sorted(set(sizes) - stays, key=lambda one: (-sizes[one][0], one)):
        owed -= min(sizes[name])
        fitting = [size for size in sizes[name] if size <= gaps.total - owed]
        best = max(fitting, key=lambda size: (worth(name, gaps.num_nodes(size), size), -size))
        found[name] = gaps.take(best)
    return found


def _gap_for(counts: Mapping[int, int], replicas: int) -> int:
    """Return the smallest gap that holds all replicas, else the largest one."""
    present = [devices for devices, count in counts.items() if count]
    return min((devices for devices in present if devices >= replicas), default=max(present))
