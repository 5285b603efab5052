"""What `paceline drill` is asked to do: its options, read and checked."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from paceline import config
from paceline.errors import PlanError
from paceline.plan import Plan

__all__ = ["DrillRequest", "drill_request"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrillRequest:
    """What to drill."""

    script: Path
    args: tuple[str, ...] = ()  # the script's own
    workers: int | None = None  # None: the script's own number
    plan: Plan | None = None  # None: the script's own
    overrides: tuple[str, ...] = ()  # of plan and job, as for `paceline run`
    faults: str = ""  # of paceline.testing.Programme; "": one of each kind, or `num_random`
    num_random: int | None = None
    seed: int = 0
    steps: int = 40
    together: bool = False
    keep_plan: bool = False
    tolerance: float | None = None  # None: as the plan promises
    save_every: int | None = None  # None: an eighth of the steps
    silence_s: float = 3.0
    limit_s: float | None = None  # of each run; None: by the undisturbed one's
    keep: Path | None = None
    json: bool = False


def drill_request(arguments: argparse.Namespace) -> DrillRequest:
    """Read and check the options; PlanError where one cannot work."""
    script: Path = arguments.script
    if not script.is_file():
        raise PlanError(f"There is no file {script}. Name a Python script, for example: paceline drill train.py")
    keep: Path | None = arguments.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise PlanError(f"--keep {keep} is there already and not an empty directory. Name a new one.")
    fields: dict[str, Any] = {
        "script": script,
        "args": arguments.script_args,
        "plan": None if arguments.plan is None else Plan.parse(arguments.plan),
        "overrides": tuple(arguments.overrides),
        "faults": arguments.faults or "",
        "together": arguments.together,
        "keep_plan": arguments.keep_plan,
        "keep": keep,
        "json": arguments.json,
    }
    annotations = config.annotations_of(DrillRequest)
    for name in ("workers", "num_random", "seed", "steps", "tolerance", "save_every", "silence_s", "limit_s"):
        text = getattr(arguments, name)
        if text is not None:
            option = "--random" if name == "num_random" else f"--{name.replace('_', '-')}"
            fields[name] = value = config.parse_value(text, annotations[name], path=option)
            if name != "seed" and value <= 0:
                raise PlanError(f"{option} is {value}; it must be more than 0.")
    return DrillRequest(**fields)
