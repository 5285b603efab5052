"""Injects faults into a run and reports what became of it: what `paceline drill` is made of, for tests of your own.

from paceline.testing import assert_unharmed, run_with

def test_a_killed_worker_costs_nothing(tmp_path):
    options = {"workers": 3, "plan": "replicas=1-3+batch(size=24)", "max_steps": 20}
    like = run_with("", "train.py", folder=tmp_path / "like", **options)
    report = run_with("kill:worker=1,step=9", "train.py", folder=tmp_path / "killed", **options)
    assert_unharmed(report, like)
"""

from __future__ import annotations

from paceline.testing.drill_folder import Came
from paceline.testing.faults import KINDS, PLACES, Fault, Programme
from paceline.testing.report import Report, Start
from paceline.testing.runs import assert_unharmed, run_with

__all__ = [
    "KINDS",
    "PLACES",
    "Came",
    "Fault",
    "Programme",
    "Report",
    "Start",
    "assert_unharmed",
    "run_with",
]
