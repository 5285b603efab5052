"""Names the directory of a new run."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["new_run_dir"]


def new_run_dir(script: Path | None) -> Path:
    """A directory that is not there yet: runs/<program>-<date>-<time>."""
    name = f"{script.stem if script and script.stem else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path
