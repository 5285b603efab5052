"""An all-reduce schedule as text: a line for each round, a column for each worker, in it what the worker sends."""

from __future__ import annotations

from paceline.schedule.allreduce.rounds import Schedule

__all__ = ["draw"]

LEGEND = "+3>1: sends chunk 3 to worker 1, which adds it; =3>1: which puts it in the place of its own"


def draw(schedule: Schedule, *, most_rounds: int | None = None) -> str:
    """Return the picture; after `most_rounds` rounds it is cut off, and says so."""
    size = schedule.num_workers
    shown = schedule.rounds[:most_rounds]
    rows = [["round", *(f"worker {worker}" for worker in range(size))]]
    for number, sends in enumerate(shown):
        cells = [
            " ".join(f"{send.what}>{send.target}" for send in sends if send.source == worker) for worker in range(size)
        ]
        rows.append([str(number), *(cell or "." for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    left_out = len(schedule.rounds) - len(shown)
    return "\n".join(
        [
            f"{schedule.name}: {size} workers, {schedule.num_chunks} chunks, {len(schedule.rounds)} rounds",
            f"({LEGEND})",
            *lines,
            *([f"... and {left_out} more"] if left_out else []),
        ]
    )
