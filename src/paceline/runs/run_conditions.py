"""Under which conditions a run's steps were taken: whether workers changed, and whether they had cores."""

from __future__ import annotations

import statistics
import time

from paceline.events import MicroBatchHalved, Record, Regrouped, WorkerJoined, WorkerLost, WorkerStarted
from paceline.monitor.records.steps import Step
from paceline.processes import run_delay_s, this_host

__all__ = ["RunConditions"]


class RunConditions:
    """A sink of one attempt that notes under which conditions its steps were taken."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pids: dict[int, int] = {}  # of this host's workers
        self._delays: dict[int, tuple[float, float]] = {}  # when steps began: the clock, and seconds without a core
        self._now: dict[int, tuple[float, float]] = {}
        self.change = ""  # why not all steps were alike

    def accept(self, item: Record | Step) -> None:
        """Note who takes part, and when steps begin."""
        if isinstance(item, Step):
            if not self._delays:
                self._delays = self._look()
            return
        match item.event:
            case WorkerStarted(rank=worker, pid=pid, host=host) if host == this_host():
                self._pids[worker] = pid
            case WorkerLost(rank=worker):
                self.change = self.change or f"worker {worker} was lost"
            case WorkerJoined(rank=worker):
                self.change = self.change or f"worker {worker} was taken in"
            case MicroBatchHalved(step=step):
                self.change = self.change or f"micro-batches were halved in step {step}"
            case Regrouped(members=members) if len(members) != self._workers:
                self.change = self.change or f"{len(members)} of {self._workers} workers went on"
            case _:
                pass

    def close(self) -> None:
        """Nothing is open."""

    def poll(self) -> None:
        """Look how long workers have waited for cores so far."""
        if self._delays:
            self._now |= self._look()

    @property
    def core_wait(self) -> float | None:
        """The share of the steps' time in which the typical worker had no core; None if unknown."""
        shares = [
            (delay_s - self._delays[worker][1]) / (now - self._delays[worker][0])
            for worker, (now, delay_s) in self._now.items()
            if worker in self._delays and now > self._delays[worker][0]
        ]
        return statistics.median(shares) if shares else None

    def _look(self) -> dict[int, tuple[float, float]]:
        now = time.monotonic()
        delays = {worker: run_delay_s(pid) for worker, pid in self._pids.items()}
        return {worker: (now, delay_s) for worker, delay_s in delays.items() if delay_s is not None}
