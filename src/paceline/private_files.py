"""Directories and files of a run that other users of the host must not read or write."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["make_run_directory", "write_private"]


def make_run_directory(run_dir: Path | str) -> None:
    """Make a run's directory, readable by this user alone; one that exists keeps its mode. Raises OSError.

    Logs, checkpoints and the pickled function of `paceline.run(fn)` lie in it.
    """
    run_dir = Path(run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only this user may read or write, also where the directory is open to others."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
