"""How a sweep stands, noted in its folder and shown, whenever it has changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from paceline import clock
from paceline.errors import PlanError
from paceline.pool.pool_state import RunEntry
from paceline.processes import process_started_s, this_host
from paceline.sweep.study_file import StudyFile
from paceline.sweep.sweep_record import SweepRecord, TrialRow, write_table
from paceline.sweep.trial_rows import trial_row
from paceline.sweep.trial_run import run_name
from paceline.sweep.trial_store import TrialStore, parameters_of

__all__ = ["SweepProgress", "former_record"]


class SweepProgress:
    """The record of this process's sweep. `show` gets it whenever it has changed; `say` gets what goes wrong."""

    def __init__(
        self,
        study: StudyFile,
        store: TrialStore,
        *,
        show: Callable[[SweepRecord], None],
        say: Callable[[str], None],
    ) -> None:
        self._study, self._store, self._show, self._say = study, store, show, say
        self._reached: dict[int, tuple[int, int | None]] = {}  # step and last step of trials; runs leave the pool
        self._ended: dict[int, TrialRow] = {}
        self.record = self._first_record()

    def reach(self, number: int, step: int) -> None:
        """A trial has reached a step, at least."""
        before, last_step = self._reached.get(number, (0, None))
        self._reached[number] = max(before, step), last_step

    def note(self, state: str, runs: Mapping[str, RunEntry]) -> None:
        """Write `sweep.json` and show it, where something has changed; `trials.csv`, where a trial's state has. `runs`:
        of the pool, by name.
        """
        best = self._store.best()
        now = dataclasses.replace(
            self.record,
            state=state,
            wanted=self._store.wanted(),
            best=None if best is None else best.number,
            trials=tuple(self._rows(runs)),
        )
        if dataclasses.replace(now, updated=self.record.updated) == self.record and self.record.updated:
            return
        before = [row.state for row in self.record.trials]
        self.record = dataclasses.replace(now, updated=clock.now())
        try:
            self.record.save(self._study.folder)
            if before != [row.state for row in now.trials]:
                write_table(self._study.folder, now.trials)
        except OSError as error:  # the disk is full, for example: trials go on
            self._say(f"sweep.json cannot be written: {error}")
        self._show(self.record)

    def _first_record(self) -> SweepRecord:
        study, now = self._study, clock.now()
        before = former_record(study.folder)
        if before is not None:
            now, self._reached = before.started, {row.number: (row.step, row.last_step) for row in before.trials}
        return SweepRecord(
            name=study.name,
            study=str(study.path),
            objective=study.objective.metric,
            direction=study.objective.direction,
            state="running",
            host=this_host(),
            pid=os.getpid(),
            pid_started_s=process_started_s(os.getpid()) or 0.0,
            started=now,
            updated=0.0,
            pool=str(study.pool),
            wanted=None,
            best=None,
            log=study.space.log,
        )

    def _rows(self, runs: Mapping[str, RunEntry]) -> Iterator[TrialRow]:
        for trial in self._store.trials():
            row = self._ended.get(trial.number)
            if row is None:
                entry = runs.get(run_name(self._study, trial.number))
                parameters = parameters_of(self._study, trial)
                row = trial_row(trial, parameters, entry, reached=self._reached.get(trial.number))
                self._reached[trial.number] = row.step, row.last_step
                if trial.state.is_finished():
                    self._ended[trial.number] = row
            yield row


def former_record(folder: Path) -> SweepRecord | None:
    """The record of an earlier start; None where there is none, or it is damaged."""
    try:
        return SweepRecord.load(folder)
    except PlanError:
        return None
