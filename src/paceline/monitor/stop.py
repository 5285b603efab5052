"""`paceline stop RUN`: asks a run's supervisor to end it in order, and waits until it has."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from paceline.monitor.files import local_path
from paceline.monitor.process import is_same_process
from paceline.monitor.run_record import RunRecord

__all__ = ["main_stop"]

PATIENCE_S = 15.0  # beyond the time that the workers have for the step in hand and a save (the job's grace_s)


def main_stop(run_dir: Path | str) -> int:
    """Send SIGTERM to the supervisor and wait until it is gone: the step in hand is finished, and everything saved.

    Returns 0 when the run has ended (also when it had before), 1 when it goes on for too long, 2 where there is none.
    """
    try:
        record = RunRecord.load(run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    name = local_path(record.run_dir)
    if record.state == "running" and not record.is_here():
        print(f"paceline: {name} runs on host {record.host}: use `paceline stop` there", file=sys.stderr)
        return 2
    if not record.is_alive():
        print(f"{name} does not run: it is {record.state_now()}")
        return 0
    print(f"stopping {name} (process {record.pid})", flush=True)
    patience_s = PATIENCE_S + float(record.job.get("grace_s", 0.0))
    if not _end(record.pid, record.pid_started_s, patience_s):
        print(
            f"paceline: process {record.pid} still runs after {patience_s:.0f} s; "
            "`paceline stop` once more makes it kill its workers at once",
            file=sys.stderr,
        )
        return 1
    print(f"{name} is {RunRecord.load(run_dir).state_now()}")
    return 0


def _end(pid: int, started_s: float, patience_s: float) -> bool:
    """Send SIGTERM to exactly this process; say whether it was gone in time."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or a sandbox without it
        return _end_by_number(pid, started_s, patience_s)
    try:
        if not is_same_process(
            pid, started_s
        ):  # asked after opening: from now on the number cannot change hands unseen
            return True
        signal.pidfd_send_signal(watched, signal.SIGTERM)
        return bool(select.select([watched], [], [], patience_s)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(watched)


def _end_by_number(pid: int, started_s: float, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    if is_same_process(pid, started_s):
        os.kill(pid, signal.SIGTERM)
    while is_same_process(pid, started_s):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
