"""Brings together what several ledgers say of the same steps: their runs, cut at common steps.

The runs of a long and irregular run are many, so they are kept in columns, and aligned a window of them at a time.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from paceline.logs.ledger_runs import Run, Shape

__all__ = ["WINDOW", "ToldRuns", "aligned"]

WINDOW = 4096  # runs that are aligned at once
WIDTH, STEP = 1 + len(Run._fields), 1 + Run._fields.index("step")  # of a row

Told = tuple[int, Run]  # a worker, and what it said


class ToldRuns:
    """What workers said of the steps of one stream, in 64 bytes for each run."""

    def __init__(self) -> None:
        self._shapes: dict[Shape, int] = {}
        self._rows = array("q")  # of each run the worker, the shape's number, and its other fields

    def __len__(self) -> int:
        return len(self._rows) // WIDTH

    def add(self, worker: int, run: Run) -> None:
        self._rows.extend((worker, self._shapes.setdefault(run.shape, len(self._shapes)), *run[1:]))

    def windows(self) -> Iterator[tuple[list[Told], int | None]]:
        """Yield runs by the steps that they begin at, some at once, with the first step of those that follow."""
        if not self._rows:
            return
        shapes = list(self._shapes)
        rows = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, WIDTH)
        order = np.argsort(rows[:, STEP], kind="stable")
        for begin in range(0, len(order), WINDOW):
            chosen = rows[order[begin : begin + WINDOW]].tolist()
            told = [(worker, Run(shapes[shape], *fields)) for worker, shape, *fields in chosen]
            yield told, int(rows[order[begin + WINDOW], STEP]) if begin + WINDOW < len(order) else None


def aligned(told: ToldRuns, *, cuts: Collection[int] = ()) -> Iterator[list[Told]]:
    """Yield runs of exactly the same steps, by steps, each step once; in a group by worker.

    `cuts`: no run reaches over the beginning of one of these steps.
    """
    reaching: list[Told] = []  # over the end of a window
    for window, until in told.windows():
        here, later = list[Told](), list[Told]()
        for worker, run in (*reaching, *window):
            num = run.num if until is None or run.last_step < until else run.before(until)
            if num:
                here.append((worker, run if num == run.num else run.part(0, num)))
            if num < run.num:
                later.append((worker, run.part(num, run.num) if num else run))
        reaching = later
        yield from _groups(here, cuts)


def _groups(told: Sequence[Told], cuts: Collection[int]) -> list[list[Told]]:
    if all(run.num == 1 for _, run in told):
        return _by_step(told)
    edges = {*cuts}
    for _, run in told:
        edges.add(run.step)
        edges.add(run.last_step + 1)
    groups = _grouped(told, sorted(edges))
    ends = list(itertools.accumulate((group[0][1].last_step for group in groups), max))
    if any(later[0][1].step <= end for later, end in zip(groups[1:], ends, strict=False)):
        # Their steps lie between each other's, as of two strides.
        groups = _by_step([(worker, one) for group in groups for worker, run in group for one in run.each()])
    return groups


def _grouped(told: Sequence[Told], edges: Sequence[int]) -> list[list[Told]]:
    groups: dict[tuple[int, int, int], list[Told]] = {}
    for worker, run in told:
        for piece in _cut(run, edges):
            groups.setdefault((piece.step, piece.num, piece.stride if piece.num > 1 else 0), []).append((worker, piece))
    return [_by_worker(groups[key]) for key in sorted(groups)]


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


def _by_step(told: Sequence[Told]) -> list[list[Told]]:
    """Groups of runs of one step each."""
    found: dict[int, list[Told]] = {}
    for one in told:
        found.setdefault(one[1].step, []).append(one)
    return [_by_worker(found[step]) for step in sorted(found)]


def _by_worker(group: list[Told]) -> list[Told]:
    return sorted(group, key=lambda one: one[0]) if len(group) > 1 else group
