"""What a program gives to DeepSpeed's monitor: it goes to the run's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.worker.worker import Worker

__all__ = ["Monitor"]


class Monitor:
    """What DeepSpeed's monitor takes goes to the run's metrics."""

    enabled = True

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def write_events(self, events: Sequence[tuple[str, Any, int]], flush: bool = True) -> None:
        """Report (name, value, step) values with the latest step."""
        self._worker.report(**{name: value for name, value, _ in events})
