"""Has all workers run a script up to its data at the same time, and measures how fast each gets it.

Worker 0 runs the script first, since scripts let it download and prepare; then the others do. A script that fails on
one worker must not leave the others waiting: each worker takes part in the same calls whatever its script does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline.cli.plan_costs.subject import Subject
from paceline.doctor.loader_rates import reading_rate
from paceline.doctor.measured import ReadingRate, ScriptReading
from paceline.errors import PlanError
from paceline.plan import CommandPlan
from paceline.planner.axes import Axes
from paceline.planner.named_cluster import cluster_named
from paceline.worker.run_member import parts_of
from paceline.worker.script_inspection import InspectionReport, ScriptData, inspect_script

__all__ = ["AskedScript", "read_script"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AskedScript:
    """The script that the command names, with its plan and arguments."""

    path: Path
    plan: CommandPlan
    args: Sequence[str]


class _Reader:
    """One worker's part."""

    def __init__(self, worker: paceline.Worker, *, seconds: float) -> None:
        self._worker, self._seconds = worker, seconds
        self._has_met = False
        self.rate: ReadingRate | None = None
        self.problem: str | None = None

    def meet(self, data: ScriptData | None) -> None:
        """Wait until every worker is at its data, and read it with them; None: this worker's script has none."""
        if self._has_met:
            return
        self._has_met = True
        worker = self._worker
        if worker.is_first:
            worker.wait()  # the others begin
        is_there = worker.gather(data is not None)
        if data is None:
            self.problem = "it ended, or went on to train, before it called worker.batches(...)"
        if data is None or not all(is_there):
            return
        try:
            # Workers that run the same micro-batches, of a tensor parallel model for example, all read them.
            readers = Axes.of(data.plan.layout, worker.workers).data
            self.rate = reading_rate(
                data,
                index=worker.rank // (worker.workers // readers),
                readers=readers,
                seconds=self._seconds,
                pin=worker.device.type == "cuda",
                timeout_s=parts_of(worker).timeout_s,
            )
        except Exception as error:  # the user's code
            self.problem = _first_line(error)


def read_script(worker: paceline.Worker, asked: AskedScript, *, cluster: Path, seconds: float) -> ScriptReading:
    """Measure with all workers of a run; all return the same but for the appetite, which the first one predicts on the
    cluster of this file. What the script does up to its first step is done, also downloads; nothing trains.
    """
    reader = _Reader(worker, seconds=seconds)
    found: InspectionReport | None = None
    if not worker.is_first:
        worker.wait()
    failure: str | None = None
    try:
        found = inspect_script(
            asked.path,
            args=asked.args,
            plan=asked.plan,
            workers=worker.workers,
            rank=worker.rank,
            at_data=reader.meet,
        )
    except (Exception, SystemExit) as error:  # the user's code
        failure = _first_line(error)
    reader.meet(None)
    answers: list[tuple[ReadingRate | None, str | None]] = worker.gather((reader.rate, failure or reader.problem))
    rates = [rate for rate, _ in answers if rate is not None]
    if len(rates) < worker.workers:
        why = next(f"on worker {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem is not None)
        return ScriptReading(script=str(asked.path), rates=[], problem=why)
    reading = ScriptReading(script=str(asked.path), rates=rates, problem=None)
    if not worker.is_first or found is None:
        return reading
    return dataclasses.replace(reading, **_appetite(found, cluster, worker.workers))


def _appetite(found: InspectionReport, cluster: Path, workers: int) -> dict[str, Any]:
    """Samples per second of each worker's steps, or why they are not known."""
    try:
        subject = Subject.of(found)
        priced = subject.price(subject.plan, cluster_named(str(cluster), workers).cluster, workers=workers)
        readers = priced.case.axes.data
        return {"plan": str(subject.plan), "appetite": priced.samples_per_s / readers}
    except PlanError as error:
        return {"plan": str(found.plan), "no_appetite": str(error)}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
