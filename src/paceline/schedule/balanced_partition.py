"""Partitions a sequence of layer costs into contiguous pipeline stages, so that the largest stage is minimal."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

__all__ = ["part_costs", "partition_evenly"]


def partition_evenly(
    costs: Sequence[float], num_parts: int, *, extra: Sequence[float] = (), closed: Collection[int] = ()
) -> tuple[int, ...]:
    """Return where each part begins (the first at 0), so that the largest part's cost is the least possible.

    No part is empty. `extra[k]` is a fixed cost of part k (a loss, a data reader). `closed` holds the indices of items
    before which no part may begin. Among partitions with the same largest part, more even ones are preferred. Exact, in
    O(num_parts * len(costs)^2). Raises ValueError if there are too few places.
    """
    open_places = [place for place in range(1, len(costs)) if place not in closed]
    if not 1 <= num_parts <= len(open_places) + 1:
        raise ValueError(
            f"{len(costs)} items with {len(open_places)} places to cut cannot make {num_parts} parts; "
            f"from 1 to {len(open_places) + 1} can be made."
        )
    if extra and len(extra) != num_parts:
        raise ValueError(f"{len(extra)} extra costs were given for {num_parts} parts. Give one for each part, or none.")
    fixed = list(extra) or [0.0] * num_parts
    total = list(itertools.accumulate(costs, initial=0.0))
    places = [0, *open_places, len(costs)]
    # best[end] = (largest, sum of squares, where the last part begins), for the parts so far, up to places[end]
    table: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, -1)}]
    for part in range(num_parts):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(part + 1, len(places)):
            choices = []
            for begin, (largest, squares, _) in table[part].items():
                if begin < end:
                    cost = total[places[end]] - total[places[begin]] + fixed[part]
                    choices.append((max(largest, cost), squares + cost * cost, begin))
            row[end] = min(choices)
        table.append(row)
    starts: list[int] = []
    end = len(places) - 1
    for row in reversed(table[1:]):
        end = row[end][2]
        starts.append(places[end])
    return tuple(reversed(starts))


def part_costs(costs: Sequence[float], starts: Sequence[int], *, extra: Sequence[float] = ()) -> tuple[float, ...]:
    """Return each part's cost."""
    bounds = [*starts, len(costs)]
    fixed = list(extra) or [0.0] * len(starts)
    return tuple(sum(costs[a:b]) + fixed[k] for k, (a, b) in enumerate(itertools.pairwise(bounds)))
