"""`FOLDER/sweep.json`: how a sweep stands, for the page, `--show` and programs; and `FOLDER/trials.csv`, for tables.

Both are replaced in one instant. `docs/reference/study-file.md` has their fields.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import fitted, read_object
from paceline.processes import is_same_process, this_host
from paceline.regular_files import read_regular

__all__ = ["SweepRecord", "TrialRow", "write_table"]

FILE, TABLE = "sweep.json", "trials.csv"
MOST_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """A trial. `state`: waiting, running, paused, finished, pruned or failed; `run_dir` is relative to the folder."""

    number: int
    state: str
    parameters: Mapping[str, str | int | float | bool]
    value: float | None = None
    step: int = 0
    last_step: int | None = None
    replicas: int = 0
    run_dir: str
    why: str = ""
    started: float | None = None  # seconds since 1970, as Optuna has it
    ended: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepRecord:
    """A sweep and its trials. `state`: running, finished or stopped; `wanted` trials, None: no limit. `log`:
    parameters of which small and large values are tried alike."""

    name: str
    study: str
    objective: str
    direction: str
    state: str
    host: str
    pid: int
    pid_started_s: float
    started: float
    updated: float
    pool: str
    wanted: int | None
    best: int | None
    log: Sequence[str] = ()
    trials: Sequence[TrialRow] = ()

    @classmethod
    def load(cls, folder: Path) -> SweepRecord:
        """Read it; raises PlanError where there is none, or it is damaged."""
        try:
            return fitted(cls, read_object(read_regular(folder / FILE, MOST_BYTES)))
        except FileNotFoundError:
            raise PlanError(f"There is no {folder / FILE}: the sweep has not been started yet.") from None
        except (ValueError, OSError) as error:
            raise PlanError(
                f"{folder / FILE} cannot be read ({error}): it is damaged or of another version."
            ) from error

    def save(self, folder: Path) -> None:
        replace_text(folder / FILE, json.dumps(self.table(), indent=1, allow_nan=False) + "\n")

    def table(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def is_alive(self) -> bool:
        """Whether its process is at work on this host."""
        return self.host == this_host() and is_same_process(self.pid, self.pid_started_s)

    @property
    def state_now(self) -> str:
        """The state; "killed" where it should run and its process is gone."""
        is_gone = self.state == "running" and self.host == this_host() and not self.is_alive()
        return "killed" if is_gone else self.state


def write_table(folder: Path, rows: Sequence[TrialRow]) -> None:
    """Write `trials.csv`: a row for each trial, a column for each parameter."""
    names = list(dict.fromkeys(name for row in rows for name in row.parameters))
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["number", "state", "value", "step", "seconds", *names, "run_dir", "why"])
    for row in rows:
        took_s = round(row.ended - row.started, 1) if row.started is not None and row.ended is not None else None
        values = [row.parameters.get(name) for name in names]
        out.writerow([row.number, row.state, row.value, row.step, took_s, *values, row.run_dir, row.why])
    replace_text(folder / TABLE, text.getvalue())
