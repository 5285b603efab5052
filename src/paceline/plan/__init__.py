"""What to do: the Plan (what can change the numbers) and the Job (what cannot)."""

from __future__ import annotations

from paceline.plan.batch import Batch
from paceline.plan.command_plan import CommandPlan, read_plan
from paceline.plan.compute import Compute
from paceline.plan.guard import Guard
from paceline.plan.job import Assignment, Job, read_job_file
from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.plan.rules import BrokenRule, Rule
from paceline.plan.sync import AllReduce, Gossip, LocalSGD, Nesterov, ParameterServer, Sync
from paceline.plan.wire import Cast, Int8, OneBit, PowerSGD, Raw, Sparse, TopK, Wire

__all__ = [
    "AllReduce",
    "Assignment",
    "Batch",
    "BrokenRule",
    "Cast",
    "CommandPlan",
    "Compute",
    "Gossip",
    "Guard",
    "Int8",
    "Job",
    "Layout",
    "LocalSGD",
    "Nesterov",
    "OneBit",
    "ParameterServer",
    "Plan",
    "PowerSGD",
    "Raw",
    "Rule",
    "Sparse",
    "Sync",
    "TopK",
    "Wire",
    "read_job_file",
    "read_plan",
]
