"""What to do: the Plan (what can change the numbers) and the Job (what cannot)."""

from __future__ import annotations

from paceline.errors import PlanError
from paceline.plan.batch import Batch
from paceline.plan.compute import Compute
from paceline.plan.guard import Guard
from paceline.plan.job import Assignment, Job
from paceline.plan.job_file import read_job_file
from paceline.plan.layout import Layout
from paceline.plan.not_built import KINDS, kind
from paceline.plan.plan import Plan
from paceline.plan.rules import Broken, Rule
from paceline.plan.sync import AllReduce, Sync
from paceline.plan.wire import Cast, Raw, Wire

__all__ = [
    "AllReduce",
    "Assignment",
    "Batch",
    "Broken",
    "Cast",
    "Compute",
    "Guard",
    "Job",
    "Layout",
    "Plan",
    "Raw",
    "Rule",
    "Sync",
    "Wire",
    "read_job_file",
]


def __getattr__(name: str) -> object:
    """Refuse by name what is not built yet: `from paceline.plan import LocalSGD` says so, and what to use now."""
    if name in KINDS:
        raise PlanError(kind(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
