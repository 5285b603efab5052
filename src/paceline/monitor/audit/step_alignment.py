"""Cuts the runs of several ledgers at common steps, so that what all of them say of the same steps stands together."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from paceline.logs.ledger_runs import Run

__all__ = ["aligned"]

Told = tuple[int, Run]  # a worker, and what it said


def aligned(told: Sequence[Told], *, cuts: Iterable[int] = ()) -> Iterator[list[Told]]:
    """Yield runs of exactly the same steps, by steps, each step once; in a group the order is that of `told`.

    `cuts`: no run reaches over the beginning of one of these steps.
    """
    edges = {*cuts}
    for _, run in told:
        edges.add(run.step)
        edges.add(run.last_step + 1)
    groups = _grouped(told, sorted(edges))
    ends = list(itertools.accumulate((group[0][1].last_step for group in groups), max))
    if any(later[0][1].step <= end for later, end in zip(groups[1:], ends, strict=False)):
        groups = _singles(groups)
    yield from groups


def _grouped(told: Sequence[Told], edges: Sequence[int]) -> list[list[Told]]:
    groups: dict[tuple[int, int, int], list[Told]] = {}
    for worker, run in told:
        for piece in _cut(run, edges):
            groups.setdefault((piece.step, piece.num, piece.stride if piece.num > 1 else 0), []).append((worker, piece))
    return [groups[key] for key in sorted(groups)]


def _cut(run: Run, edges: Sequence[int]) -> Iterator[Run]:
    place = bisect.bisect_right(edges, run.step)
    if place == len(edges) or edges[place] > run.last_step:
        yield run
        return
    begin = 0
    while begin < run.num:
        place = bisect.bisect_right(edges, run.step + begin * run.stride)
        end = run.before(edges[place]) if place < len(edges) else run.num
        yield run.part(begin, end)
        begin = end


def _singles(groups: Sequence[list[Told]]) -> list[list[Told]]:
    """Groups whose steps lie between each other's, as of two strides, step by step."""
    found: dict[int, list[Told]] = {}
    for group in groups:
        for worker, run in group:
            for index in range(run.num):
                one = run.part(index, index + 1)
                found.setdefault(one.step, []).append((worker, one))
    return [sorted(found[step], key=lambda one: one[0]) for step in sorted(found)]
