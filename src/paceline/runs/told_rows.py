"""Gives the rows of `metrics.jsonl` to this host's driver, a line each on standard output, as they are committed."""

from __future__ import annotations

from paceline.events import Record
from paceline.launch.engines.sent_function import tell_row
from paceline.monitor.export.metrics_jsonl import metrics_line
from paceline.monitor.records.steps import Step

__all__ = ["ToldRows"]


class ToldRows:
    """A sink of the run's steps."""

    def __init__(self, mark: str, *, attempt: int) -> None:
        self._mark, self._attempt = mark, attempt

    def accept(self, item: Record | Step) -> None:
        if isinstance(item, Step):
            tell_row(self._mark, metrics_line(item, attempt=self._attempt))

    def close(self) -> None:
        """Nothing is kept back."""
