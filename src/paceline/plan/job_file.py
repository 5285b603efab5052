"""A job file is a Job in TOML, and may hold its plan: as one line of text or as tables.

    program = "train.py"            # relative to this file's folder; other paths to where the command runs
    workers = 4
    plan = "replicas=4+batch(size=64)"

or, instead of the last line,

    [plan]
    batch = {size = 64, micro = 8}
    wire = "cast(dtype=bf16)"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import config
from paceline.errors import PlanError
from paceline.plan.job import Job
from paceline.plan.plan import Plan

__all__ = ["read_job_file", "read_plan"]


def read_job_file(path: Path, changes: Mapping[str, Any] | None = None) -> tuple[Job, Plan | None, tuple[str, ...]]:
    """Return the job, its plan if it has one, and the names of the Job fields that are set, in order.

    `changes` are Job fields that win over the file's: they are merged before the job is checked as a whole, so that a
    file may leave open what the command line adds. Raises PlanError that begins with the file's path.
    """
    path = Path(path)
    table = config.load_toml(path)
    try:
        plan = read_plan(table.pop("plan")) if "plan" in table else None
        program = table.get("program")
        if isinstance(program, str) and program:
            table["program"] = str(path.parent / program)
        table |= changes or {}
        return config.read(Job, table), plan, tuple(table)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_plan(value: object) -> Plan:
    """Return the plan that a configuration value means: one line of text, or a table of parts."""
    if isinstance(value, str):
        return Plan.parse(value)
    if isinstance(value, Mapping):
        return config.read(Plan, value, path="plan")
    raise PlanError(f"plan is {value!r}; it must be a table, or one line of text such as 'replicas=2'.")
