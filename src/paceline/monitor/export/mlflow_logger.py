"""Logs a run to MLflow; runs in the tracker's process (`tracker_process`), which may import the package.

MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the package's other variables count as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from paceline import environment
from paceline.monitor.export.run_logger import LoggedRun, ScalarPoint
from paceline.monitor.export.tracker_state import TrackerState

__all__ = ["MlflowLogger"]

EXPERIMENT = "paceline"  # where the environment names none
AT_ONCE = 1000  # metrics of a request, by MLflow's REST API
PARAMETERS_AT_ONCE = 100
MOST_TEXT = 6000  # characters of a parameter's value
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MlflowLogger:
    """A `RunLogger` that goes on with the MLflow run whose id is in `RUN/loggers/mlflow.json`."""

    def __init__(self) -> None:
        self._client: Any = None
        self._state: TrackerState | None = None

    def start(self, run: LoggedRun) -> int | None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient()
        state = self._state = TrackerState.of(run, "mlflow", makes_id=False)
        if state.run_id:
            client.update_run(state.run_id, status="RUNNING")
        else:
            made = client.create_run(_experiment(client), run_name=run.name, tags={"paceline.run_dir": run.run_dir})
            state.run_id = made.info.run_id
            state.save()
        has = set(client.get_run(state.run_id).data.params)  # a parameter is set once
        told = {key: str(value)[:MOST_TEXT] for key, value in run.parameters.items() if key not in has}
        params = [Param(key, value) for key, value in told.items()]
        for first in range(0, len(params), PARAMETERS_AT_ONCE):
            client.log_batch(state.run_id, params=params[first : first + PARAMETERS_AT_ONCE])
        client.set_tag(state.run_id, "paceline.attempt", run.attempt)
        state.tell_place(f"{client.tracking_uri}, run {state.run_id}")
        return state.last_step

    def log(self, points: Sequence[ScalarPoint]) -> None:
        if self._state is None:
            return
        metrics = list(_metrics(points))
        for first in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._state.run_id, metrics=metrics[first : first + AT_ONCE])
        self._state.note(max(point.step for point in points))

    def end(self, state: str) -> None:
        if self._state is not None:
            self._client.set_terminated(self._state.run_id, status=STATUS[state])


def _metrics(points: Sequence[ScalarPoint]) -> Iterator[Any]:
    from mlflow.entities import Metric

    for point in points:
        for name, value in point.values.items():
            yield Metric(_legal(name), float(value), round(point.time * 1000), point.step)


def _legal(name: str) -> str:
    """MLflow takes letters, digits, and _ - . : / and spaces in names."""
    return "".join(each if each.isalnum() or each in "_-.:/ " else "_" for each in name)


def _experiment(client: Any) -> str:
    number, name = environment.mlflow_experiment()
    if number is not None:
        return number
    name = name or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found is not None else client.create_experiment(name)
