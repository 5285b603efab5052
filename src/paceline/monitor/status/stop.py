"""`paceline stop RUN`: asks a run's supervisor to end the run cleanly, and waits until it has ended."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline import clock
from paceline.monitor.records.run_files import local_path
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.status.status import status
from paceline.plain_data import finite, read_object, whole
from paceline.processes import is_same_process
from paceline.regular_files import read_regular

__all__ = ["main_stop"]

SOON_S = 3.0  # an ordinary step and its save have ended by then
TAKEOVER_S = 5.0  # another host has taken over by then, if it does
FACTS = ("attempt", "step", "steps", "samples", "steps_unsaved", "checkpoints_saved")  # of a summary
PATIENCE_S = 15.0  # beyond the time that the workers have for the step in hand and a save (the job's grace_s)


def main_stop(run_dir: Path | str, ask: Callable[[int], bool] | None = None) -> int:
    """Have the supervisor end the run and wait until it is gone: the step in hand is finished, and everything saved.

    `ask(pid)` asks the supervisor of a run on several hosts, where SIGTERM may be for one host alone; False where it
    takes no commands. Any other one gets SIGTERM.
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
    grace_s = _grace_s(record)
    patience_s = PATIENCE_S + grace_s
    began = clock.now()

    def explain() -> None:
        print(_still_there(record, grace_s), flush=True)

    is_asked = ask is not None and record.job.get("head") is not None and ask(record.pid)
    if not _end(record.pid, record.pid_started_s, patience_s, explain, is_asked=is_asked):
        print(
            f"paceline: process {record.pid} still runs after {patience_s:.0f} s; "
            "`paceline stop` once more makes it kill its workers at once",
            file=sys.stderr,
        )
        return 1
    after = _settled(record)
    if after.state == "running" and (after.host, after.pid) != (record.host, record.pid):
        print(f"paceline: {name} goes on, led by host {after.host}: use `paceline stop` there", file=sys.stderr)
        return 1
    for line in _how_it_ended(after, began):
        print(line)
    return 0


def _settled(before: RunRecord) -> RunRecord:
    """The run's record, once another coordinator has entered itself, if one takes over."""
    deadline = time.monotonic() + (TAKEOVER_S if before.job.get("head") is not None else 0.0)
    while True:
        now = RunRecord.load(before.run_dir)
        is_same = (now.state, now.host, now.pid) == (before.state, before.host, before.pid)
        if not is_same or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def _grace_s(record: RunRecord) -> float:
    """What the job gives its workers to leave in; a record that does not say it gives them none."""
    try:
        return max(0.0, finite(record.job.get("grace_s", 0.0)))
    except ValueError:
        return 0.0


def _still_there(record: RunRecord, grace_s: float) -> str:
    """What the run waits for, as far as it is known, and for how long."""
    now = status(record.run_dir)
    known = [now.progress.still_text()] if now.stands_still else []
    known += [now.trouble.warning] if now.trouble.warning else []
    if now.tasks is not None or now.progress.has_own_loop:
        return f"its programs have got SIGTERM, and may save; those that have not left after {grace_s:.0f} s are ended"
    until = f"it finishes step {now.progress.step + 1} and saves; "
    until += f"a worker that has not left {grace_s:.0f} s after SIGTERM is ended"
    return "\n  ".join([until, *known])


def _how_it_ended(record: RunRecord, began: float) -> Iterator[str]:
    """The run's end, what is saved of it, and what the supervisor warned of since `began`."""
    facts = _summary(record.run_dir / "summary.json")
    state, name = record.state_now(), local_path(record.run_dir)
    if facts.get("attempt") != record.attempt:
        yield f"{name} is {state}"
        return
    if record.job.get("run_for") is not None or record.job.get("run_as") == "horovod":
        yield f"{name} is {state}; the same command has the program go on from what it has saved"
        return
    step, unsaved = facts["step"], facts["steps_unsaved"]
    if not facts["steps"]:
        saved = ""
    elif not facts["samples"]:
        saved = "; the same command has the program go on from what it has saved"
    elif not unsaved:
        saved = ", and everything is saved"
    elif unsaved == facts["steps"] and not facts["checkpoints_saved"]:
        saved = (
            f", and nothing was saved of this attempt: its {'step is' if unsaved == 1 else f'{unsaved} steps are'} lost"
        )
    else:
        saved = (
            f", and step {step - unsaved} was saved last: {unsaved} {'step is' if unsaved == 1 else 'steps are'} lost"
        )
    yield f"{name} is {state} at step {step}{saved}"
    warning, warned_s = (trouble := status(record.run_dir).trouble).warning, trouble.warned_s
    if warning and warned_s is not None and clock.now() - warned_s >= began:
        yield f"  {warning}"


def _summary(path: Path) -> dict[str, int]:
    """The numbers of a summary that are needed here; empty where it does not say them."""
    try:
        said = read_object(read_regular(path))
        return {name: whole(said[name]) for name in FACTS}
    except (OSError, ValueError, KeyError):  # the disk is full, or it was ended before it could say anything
        return {}


def _end(pid: int, started_s: float, patience_s: float, explain: Callable[[], None], *, is_asked: bool) -> bool:
    """Send SIGTERM to exactly this process, unless it has been asked to end, and `explain` when that takes long; say
    whether it was gone in time.
    """
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or a sandbox without it
        return _end_by_number(pid, started_s, patience_s, explain, is_asked=is_asked)
    try:
        # Asked after opening: from now on the number cannot change hands unseen.
        if not is_same_process(pid, started_s):
            return True
        if not is_asked:
            signal.pidfd_send_signal(watched, signal.SIGTERM)
        if select.select([watched], [], [], min(SOON_S, patience_s))[0]:
            return True
        explain()
        return bool(select.select([watched], [], [], max(0.0, patience_s - SOON_S))[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(watched)


def _end_by_number(
    pid: int, started_s: float, patience_s: float, explain: Callable[[], None], *, is_asked: bool
) -> bool:
    deadline = time.monotonic() + patience_s
    explain_at: float | None = time.monotonic() + SOON_S
    if not is_asked and is_same_process(pid, started_s):
        os.kill(pid, signal.SIGTERM)
    while is_same_process(pid, started_s):
        if time.monotonic() > deadline:
            return False
        if explain_at is not None and time.monotonic() > explain_at:
            explain_at = None
            explain()
        time.sleep(0.05)
    return True
