"""What a worker leaves behind when it fails: error.json, for whoever explains the failure to the user."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from pathlib import Path

from paceline.errors import PlanError, SyncError
from paceline.plan.job import Assignment

__all__ = ["is_echo", "write_error"]

PEER_GONE = re.compile(
    r"lost contact with a peer|[Cc]onnection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
)


def write_error(error: BaseException, assignment: Assignment, *, step: int) -> None:
    """Write error.json, once: the first error of a worker is the one that counts."""
    path = Path(assignment.worker_dir) / "error.json"
    if path.exists():
        return
    fields = {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "worker": assignment.rank,
        "host": assignment.host,
        "pid": os.getpid(),
        "step": step,
        "time": time.time(),
        "usage": isinstance(error, PlanError),
        "echo": is_echo(error),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(fields), encoding="utf-8")
    temporary.rename(path)


def is_echo(error: BaseException) -> bool:
    """Whether the error only says that a peer went away: the peer's own error is the one to show."""
    return isinstance(error, (SyncError, RuntimeError, ConnectionError)) and PEER_GONE.search(str(error)) is not None
