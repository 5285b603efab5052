"""A sweep in the process of a test, beside a simulated pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline import run_lock
from paceline.sweep.optuna_parts import open_storage
from paceline.sweep.study_file import read_study_file
from paceline.sweep.sweep import Sweep
from paceline.sweep.sweep_record import SweepRecord
from simulated_trials import SimulatedPool, write_study

__all__ = ["SweepInTest"]


class SweepInTest:
    """A sweep whose looks the test makes; `start` is what a new process would do."""

    def __init__(self, folder: Path, **lines: Any) -> None:
        self.file = write_study(folder, **lines)
        self.pool = SimulatedPool(folder / "pool")
        self.said: list[str] = []
        self.sweep: Sweep | None = None

    def start(self) -> Sweep:
        self.release()
        self.sweep = Sweep(read_study_file(self.file), say=self.said.append)
        return self.sweep

    def release(self) -> None:
        """What the kernel does with the lock of a process that is gone."""
        run_lock.release(self.folder)

    def run(self, most: int = 60) -> SweepRecord:
        """Let time pass until all trials are over."""
        sweep = self.sweep or self.start()
        for _ in range(most):
            if sweep.look():
                return self.record
            self.pool.pass_time()
        raise AssertionError(f"not over: {self.record}\n{self.said}")

    @property
    def folder(self) -> Path:
        return self.file.parent / "runs" / "study"

    @property
    def record(self) -> SweepRecord:
        return SweepRecord.load(self.folder)

    @property
    def study(self) -> Any:
        import optuna

        return optuna.load_study(study_name="study", storage=open_storage(read_study_file(self.file).storage))

    def states(self) -> list[str]:
        return [row.state for row in self.record.trials]
