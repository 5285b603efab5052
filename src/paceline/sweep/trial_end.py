"""Why a trial's run has failed, in one line."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from paceline.logs.log_reader import last_lines
from paceline.monitor.status.status import status
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import RunEntry
from paceline.pool.run_control import console_of

__all__ = ["error_of"]

MOST_LINES = 20


def error_of(pool: Path, run: PoolRun, entry: RunEntry) -> str:
    """Return the error of the worker that failed first; else the last line that the run's command has printed."""
    with contextlib.suppress(ValueError):  # it has no record
        error = status(run.run_dir).trouble.error
        if error:
            return error
    console = console_of(pool, run)
    with contextlib.suppress(OSError):
        for line in itertools.islice(last_lines(console), MOST_LINES):
            if line.strip():
                return line.strip()
    return f"exit status {entry.exit_code}: see {console}"
