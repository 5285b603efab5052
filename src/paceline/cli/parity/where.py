"""Finds out where a configuration does not hold: runs it again with its modules captured, and its reference twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from paceline.cli.parity.compare import CaptureReader, Difference, first_step_over
from paceline.cli.parity.localize import MARGIN, MARGIN_OF_HALF, Departure, locate

__all__ = ["MARGINS", "ask_for_modules", "find_departure"]

ROUNDINGS = {
    "fp32": 2.0**-23,
    "fp64": 2.0**-52,
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
}  # by precision: the distance of two numbers at 1
MARGINS = {"fp32": MARGIN, "fp64": MARGIN, "bf16": MARGIN_OF_HALF, "fp16": MARGIN_OF_HALF}


def ask_for_modules(captured: Path, *, steps: int, perturbed_in: str | None = None) -> None:
    """Have a run that captures into this directory capture the modules of its first steps, too. `perturbed_in`: with
    each weight changed by one rounding of this precision."""
    captured.mkdir(parents=True, exist_ok=True)
    request = {"steps": steps, "rounding": 0.0 if perturbed_in is None else ROUNDINGS[perturbed_in]}
    (captured / "modules.json").write_text(json.dumps(request), encoding="utf-8")


def find_departure(
    run: Callable[[str, int, bool], Path],
    *,
    capture: CaptureReader,
    reference: CaptureReader,
    tolerance: float,
    precision: str,
    reported: Difference | None = None,
) -> Departure | None:
    """Return the first module that departs; None where all that was captured agrees.

    `run(what, steps, perturbed)` runs "configuration" or "reference", with the modules of the first steps captured, and
    returns the directory of its captures. `capture` and `reference` tell up to which step this is needed; `reported`
    is a value of the script that differs too much; `precision` that of the plan.
    """
    steps = first_step_over(capture, reference, tolerance)
    ours = run("configuration", steps, False)
    theirs, noisy = run("reference", steps, False), run("reference", steps, True)
    return locate(ours, theirs, noisy, steps=steps, margin=MARGINS[precision], reported=reported)
