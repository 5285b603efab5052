"""Logs a run to Weights & Biases; runs in the tracker's process (`tracker_process`), which may import the package.

WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and the package's other variables count as everywhere. W&B's own step is
the run's step, so that parts of a run that were logged offline fit together. W&B takes steps in rising order only, and
an evaluation may be known before the rows of the steps ahead of it: so points wait for two steps, and those of the same
step become one row. Where replicas take steps by themselves, a step that ends later than that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.monitor.export.run_logger import LoggedRun, ScalarPoint
from paceline.monitor.export.tracker_state import TrackerState

__all__ = ["WandbLogger"]

HELD = 2  # steps
PROJECT = "paceline"  # where neither the environment nor the package's settings name one


class WandbLogger:
    """A `RunLogger` that goes on with the W&B run whose id is in `RUN/loggers/wandb.json`."""

    def __init__(self) -> None:
        self._run: Any = None
        self._state: TrackerState | None = None
        self._rows: dict[int, dict[str, float]] = {}  # that wait
        self._newest = 0  # step

    def start(self, run: LoggedRun) -> int | None:
        import wandb

        state = self._state = TrackerState.of(run, "wandb")
        settings = wandb.setup().settings
        self._run = wandb.init(
            project=settings.project or PROJECT,
            id=state.run_id,
            resume="allow",
            name=run.name,
            dir=str(state.directory),
            config=run.parameters,
            job_type="train",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.config.update({"attempt": run.attempt}, allow_val_change=True)
        state.tell_place(self._run.url or self._run.dir)
        return state.last_step

    def log(self, points: Sequence[ScalarPoint]) -> None:
        for point in points:
            row = self._rows.setdefault(point.step, {"_timestamp": point.time})
            row.update(point.values)
            self._newest = max(self._newest, point.step)
        self._send(self._newest - HELD)

    def end(self, state: str) -> None:
        if self._run is not None:
            self._send(self._newest)
            self._run.summary["state"] = state
            self._run.finish(exit_code=0 if state == "finished" else 1)

    def _send(self, until_step: int) -> None:
        """Log the rows of these steps, and note them."""
        ready = sorted(step for step in self._rows if step <= until_step)
        for step in ready:
            self._run.log(self._rows.pop(step), step=step)
        if ready and self._state is not None:
            self._state.note(ready[-1])
