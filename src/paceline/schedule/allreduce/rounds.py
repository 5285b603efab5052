"""An all-reduce as rounds of sends: source, target and chunks of each, and whether the receiver adds or replaces.

The tensor is split into `num_chunks` chunks, which every worker has. All sends of a round carry what their senders had
when the round began. A round is not a barrier: it only defines an order. The executor of a schedule
(`comm/allreduce/schedule_executor.py`) waits for what it receives, and for nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["Round", "Schedule", "Send", "bounds", "draw", "merged", "relabelled", "split"]


class Send(NamedTuple):
    """Chunks `first` to `stop - 1` travel from `source` to `target`, which adds them to its own or puts them in their
    place; as text "0>1 +3" or "0>1 =3-5"."""

    source: int
    target: int
    first: int
    stop: int
    adds: bool

    @property
    def what(self) -> str:
        """The chunks, and whether they are added or replace: "+3", "=3-5"."""
        chunks = f"{self.first}" if self.stop == self.first + 1 else f"{self.first}-{self.stop - 1}"
        return f"{'+' if self.adds else '='}{chunks}"

    def __str__(self) -> str:
        return f"{self.source}>{self.target} {self.what}"


Round = tuple[Send, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """An all-reduce among `num_workers` workers; in no round does one of them send twice, or receive twice."""

    name: str
    num_workers: int
    num_chunks: int
    rounds: tuple[Round, ...]


def bounds(total: int, parts: int, part: int) -> tuple[int, int]:
    """Return [first, stop) of one of `parts` even parts of `total` things; parts differ by at most one."""
    return total * part // parts, total * (part + 1) // parts


def split(first: int, stop: int, pieces: int) -> Iterator[tuple[int, int]]:
    """Split [first, stop) into at most `pieces` ranges; none of them is empty."""
    for piece in range(pieces):
        low, high = bounds(stop - first, pieces, piece)
        if high > low:
            yield first + low, first + high


def relabelled(rounds: Iterable[Round], workers: Sequence[int], first_chunk: int) -> tuple[Round, ...]:
    """Return the same rounds among `workers` instead of 0, 1, ..., on the chunks from `first_chunk` on."""
    return tuple(
        tuple(
            Send(workers[source], workers[target], first + first_chunk, stop + first_chunk, adds)
            for source, target, first, stop, adds in sends
        )
        for sends in rounds
    )


def merged(schedules: Sequence[Sequence[Round]]) -> tuple[Round, ...]:
    """Run several independent schedules at once, round by round."""
    longest = max(map(len, schedules), default=0)
    return tuple(
        tuple(send for rounds in schedules if number < len(rounds) for send in rounds[number])
        for number in range(longest)
    )


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
