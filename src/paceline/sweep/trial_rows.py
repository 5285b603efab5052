"""A trial as a row: what Optuna's storage says of it, and what the pool says of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from paceline.pool.pool_state import RunEntry
from paceline.sweep.space import Value
from paceline.sweep.sweep_record import TrialRow
from paceline.sweep.trial_store import ERROR

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["trial_row"]

STATES = {"WAITING": "waiting", "COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


def trial_row(
    trial: FrozenTrial,
    parameters: Mapping[str, Value],
    entry: RunEntry | None,
    *,
    reached: tuple[int, int | None] | None = None,
) -> TrialRow:
    """`entry`: its run in the pool, if it is there; `reached`: its step and last step, as they were last known."""
    step, last_step = reached or (0, None)
    if entry is not None:
        step, last_step = max(step, entry.step), entry.last_step or last_step
    is_running = trial.state.name == "RUNNING"
    state = STATES.get(trial.state.name) or _running_state(entry)
    values = trial.intermediate_values
    value = trial.value if trial.state.is_finished() else values[max(values)] if values else None
    return TrialRow(
        number=trial.number,
        state=state,
        parameters=dict(parameters),
        value=value if value is not None and math.isfinite(value) else None,
        step=step,
        last_step=last_step,
        replicas=entry.replicas if entry is not None and is_running else 0,
        run_dir=f"trials/trial-{trial.number:04}",
        why=_why(trial, entry if state in ("waiting", "paused") else None),
        started=_seconds(trial.datetime_start),
        ended=_seconds(trial.datetime_complete),
    )


def _running_state(entry: RunEntry | None) -> str:
    if entry is None or entry.phase == "waiting":
        return "paused" if entry is not None and entry.step else "waiting"
    return "paused" if entry.phase == "leaving" else "running"


def _why(trial: FrozenTrial, entry: RunEntry | None) -> str:
    if trial.state.name == "FAIL":
        return str(trial.user_attrs.get(ERROR, ""))
    if trial.state.name == "PRUNED":
        values = trial.intermediate_values
        return f"pruned after {len(values)} {'value' if len(values) == 1 else 'values'}"
    return "" if entry is None else entry.why


def _seconds(when: datetime | None) -> float | None:
    return None if when is None else when.timestamp()
