"""A script that fails while a command looks at it: what it raised, and where in the user's own files."""

from __future__ import annotations

import traceback
from pathlib import Path

import paceline
from paceline.errors import PlanError

__all__ = ["script_failure"]

OWN = str(Path(paceline.__file__).parent)
SHOWN = 4  # innermost frames


def script_failure(error: Exception, script: Path) -> PlanError:
    """Return the error that a command prints in place of a traceback: the user's frames only, the innermost last."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        line = "" if error.text is None else f"\n    {error.text.strip()}"
        return PlanError(f"{script} cannot be read: {error.msg} ({error.filename}, line {error.lineno}){line}")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OWN, "<frozen")) and Path(frame.filename).name != "runpy.py"
    ]
    lines = [f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-SHOWN:]]
    raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return PlanError("\n".join([f"{script} fails before its model is there, with {raised}", *lines]))
