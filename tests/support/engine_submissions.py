"""A job for an engine, for tests of what is sent."""

from __future__ import annotations

from pathlib import Path

from paceline.launch.engines.sent_function import SentFunction
from paceline.launch.engines.submission import Submission
from paceline.plan import CommandPlan, Job, Plan

__all__ = ["asked"]


def asked(
    *,
    least_hosts: int = 4,
    plan: str = "replicas=32+batch(size=1024)",
    function: SentFunction | None = None,
    **job: object,
) -> Submission:
    fields: dict[str, object] = {
        "program": "/home/me/train.py",
        "args": ("--lr", "0.1"),
        "hosts": 4,
        "workers": 32,
        "head": "auto",
        "run_dir": "/home/me/runs/big",
        "save_every": 200,
        **job,
    }
    return Submission(
        job=Job(**fields),  # pyright: ignore[reportArgumentType]
        plan=CommandPlan(whole=Plan.parse(plan)),
        given=("program", "args", "hosts", "workers", "run_dir", "save_every", *job),
        folder=Path("/home/me"),
        python="/venv/bin/python",
        least_hosts=least_hosts,
        function=function,
    )
