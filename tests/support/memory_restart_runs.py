"""Runs that restart from memory, and what they are compared with: one process that nothing happens to."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import lasting
from elastic_runs import PROGRAM, Run, trained

__all__ = ["BATCHES", "FP64", "REPLICAS", "fault", "restarts", "undisturbed"]

REPLICAS = Path(__file__).with_name("replica_program.py")
BATCHES = {PROGRAM: "batch(size=20,micro=2)", REPLICAS: "batch(size=12,micro=2)"}
FP64 = "compute(precision=fp64)"
JOB: dict[str, Any] = {"save_every": None, "save_at_end": False}  # so there is nothing on the disk to go on from


def fault(worker: int, step: int, where: str) -> dict[str, Any]:
    return {"worker": worker, "step": step, "where": where}


@functools.cache
def undisturbed(program: Path) -> Run:
    """One process."""
    folder = lasting.folder("undisturbed")
    plan = f"replicas=1+{BATCHES[program]}+{FP64}"
    run = trained(folder, program=program, plan=plan, job={**JOB, "workers": 1})
    assert run.code == 0, run.output
    return run


def restarts(run: Run) -> list[dict[str, Any]]:
    """How each attempt after the first began."""
    found = []
    for log in sorted(run.run_dir.glob("attempt_*/events.jsonl"))[1:]:
        found += [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "Restarted"]
    return found
