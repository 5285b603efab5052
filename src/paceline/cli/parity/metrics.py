"""What a run's script has reported, from the events of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.events import Evaluated, Reported, StepDone, decode
from paceline.logs.log_reader import lines_of

__all__ = ["reported_metrics"]


def reported_metrics(attempt: Path) -> dict[tuple[str, int], float]:
    """Return values of `worker.report` and `worker.evaluate` by name and step: means over the workers that have one.

    Where a worker reports a name several times at a step, between batches, the last value counts.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(attempt.glob("worker_*/events.jsonl")):
        of_worker = dict(_values(path))
        for key, value in of_worker.items():
            found.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _values(path: Path) -> Iterator[tuple[tuple[str, int], float]]:
    for line in lines_of(path):
        event = decode(line).event
        if isinstance(event, (StepDone, Reported, Evaluated)):
            kind = "evaluated " if isinstance(event, Evaluated) else ""
            for name, value in event.metrics.items():
                yield (f"{kind}{name}", event.step), float(value)
