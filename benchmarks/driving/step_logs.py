"""The files in which the programs of `recovery.py` and `node_loss.py` note each step, read as they grow."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A step that a process has committed."""

    time: float
    step: int
    rank: int
    pid: int


class Logs:
    """The files that the processes of a run write, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, int] = {}
        self.lines: list[Line] = []

    def poll(self) -> list[Line]:
        """The lines since the last look."""
        new: list[Line] = []
        for path in self._folder.glob("*_*.log"):
            rank, pid = map(int, path.stem.split("_"))
            with open(path, encoding="ascii") as file:
                file.seek(self._places.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            new += [Line(float(when), int(step), rank, pid) for when, step in map(str.split, whole.splitlines())]
        new.sort(key=lambda line: line.time)
        self.lines += new
        return new

    def pids(self) -> dict[int, int]:
        """The newest process of each rank."""
        return {line.rank: line.pid for line in self.lines}

    def top(self) -> int:
        return max((line.step for line in self.lines), default=0)


def median_step(lines: list[Line]) -> float:
    mine = [line.time for line in lines if line.rank == 0]
    return statistics.median(b - a for a, b in itertools.pairwise(mine[2:]))
