"""What `paceline parity` is asked to compare: its options, read and checked."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Literal

from paceline import config
from paceline.errors import PlanError
from paceline.plan import Job, Plan

__all__ = ["STEPS", "ParityRequest", "parity_request"]

STEPS = 12  # by default: optimizers that gather ten steps before they act have acted twice


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityRequest:
    """What to compare."""

    script: Path
    args: tuple[str, ...] = ()  # the script's own
    workers: tuple[int, ...] = (1, 2)
    plans: tuple[Plan, ...] = ()  # none: the script's own
    steps: int = STEPS
    bare: bool = False  # compare with a plain torch loop, too
    float64: bool = False
    tolerance: float | None = None  # None: by precision
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    keep: Path | None = None  # directory for the runs; None: a temporary one
    json: bool = False
    where: bool = True  # run what does not hold again, to find out where


def parity_request(arguments: argparse.Namespace) -> ParityRequest:
    """Read and check the options; PlanError where one cannot work."""
    script: Path = arguments.script
    if not script.is_file():
        raise PlanError(f"There is no file {script}. Name a Python script, for example: paceline parity train.py")
    if "--for" in arguments.script_args and "--for" not in script.read_text(encoding="utf-8", errors="replace"):
        raise PlanError(
            "--for is for programs that take their steps by themselves, so that their numbers cannot be compared here: "
            "paceline parity is for scripts that call paceline.run."
        )
    counts: tuple[int, ...] = config.parse_value(arguments.workers, tuple[int, ...], path="--workers")
    steps: int = config.parse_value(arguments.steps, int, path="--steps")
    if not counts or min(counts) < 1 or steps < 1:
        raise PlanError(
            f"--workers {arguments.workers} and --steps {steps} must be at least 1 each, "
            f"for example --workers 1,2,4 --steps {STEPS}."
        )
    tolerance = None if arguments.tolerance is None else _tolerance(arguments.tolerance)
    keep: Path | None = arguments.keep
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise PlanError(f"--keep {keep} is there already and not an empty directory. Name a new one.")
    return ParityRequest(
        script=script,
        args=arguments.script_args,
        workers=tuple(dict.fromkeys(counts)),
        plans=tuple(dict.fromkeys(Plan.parse(text) for text in arguments.plans)),
        steps=steps,
        bare=arguments.bare,
        float64=arguments.float64,
        tolerance=tolerance,
        device=config.parse_value(
            arguments.device, config.annotations_of(Job)["device"], path="--device", owner=Job, name="device"
        ),
        keep=keep,
        json=arguments.json,
        where=arguments.where,
    )


def _tolerance(text: str) -> float:
    value: float = config.parse_value(text, float, path="--tolerance")
    if not 0 < value < float("inf"):
        raise PlanError(f"--tolerance is {value}; it must be more than 0, for example 1e-5.")
    return value
