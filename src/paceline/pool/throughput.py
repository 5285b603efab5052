"""How a run's speed grows with its replicas, from what it has measured so far.

A step of a fixed global batch takes w / n + c seconds on n replicas: work that they share, and what each does whatever
their number. Both are fitted to the measured steps, neither below zero. From one size alone everything is taken to be
shared work, so that a new run is tried on more; beyond what was measured this is a hope, and the next measurement
corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Throughput"]

MOST_AHEAD = 2  # a run is believed to grow to at most so many times the most replicas that it has had


class Throughput:
    """Seconds of a step by replicas."""

    def __init__(self, step_s: Mapping[int, float]) -> None:
        """`step_s`: median measured seconds of a step, by replicas; may be empty."""
        self._shared_s, self._own_s = _fit({n: seconds for n, seconds in step_s.items() if seconds > 0})
        self._most = max(step_s, default=1) * MOST_AHEAD

    def step_s(self, replicas: int) -> float:
        """Seconds of a step on so many replicas; in units of its own where nothing was measured."""
        return self._shared_s / min(replicas, self._most) + self._own_s

    def speedup(self, replicas: int) -> float:
        """How many times as fast as on one replica."""
        return self.step_s(1) / self.step_s(replicas) if replicas > 0 else 0.0


def _fit(step_s: Mapping[int, float]) -> tuple[float, float]:
    """w and c of w / n + c, by least squares of the relative errors; neither is below zero."""
    if not step_s:
        return 1.0, 0.0
    # Rows (1/n, 1) over the measured seconds, so that each should give 1.
    rows = [(1 / (n * seconds), 1 / seconds) for n, seconds in step_s.items()]
    if len(rows) > 1:
        aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
        determinant = aa * bb - ab * ab
        if determinant > 1e-12 * aa * bb:
            shared_s, own_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
            if shared_s >= 0 and own_s >= 0:
                return shared_s, own_s
            if shared_s < 0:  # more replicas are slower: nothing is shared
                return 0.0, b / bb
    return sum(row[0] for row in rows) / sum(row[0] ** 2 for row in rows), 0.0
