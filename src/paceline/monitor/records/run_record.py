"""`run.json`: what a run directory says of itself, for later readers and for other terminals.

One process writes it (the supervisor, through `begin_attempt`, `changed` and `end_attempt`). Each write replaces the
whole file at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import clock, run_lock
from paceline.events import MOST_WORKERS
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import LATEST, fitted, read_object
from paceline.private_files import make_run_directory
from paceline.processes import is_same_process, process_started_s, process_state, this_host
from paceline.regular_files import read_regular
from paceline.units import shell_text

__all__ = ["RUNNING", "AttemptRecord", "RunRecord"]

RUNNING = "running"
MOST_BYTES = 8 << 20  # of a record that is read


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One start of the run: it ended where `ended` is set."""

    attempt: int
    started: float  # clock.now()
    state: str = RUNNING
    ended: float | None = None
    exit_code: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The contents of `RUN/run.json`; `changed` and its kin write the file and return the new record."""

    run_dir: Path = dataclasses.field(compare=False)  # where the record was found; not written
    state: str = RUNNING  # running | finished | failed | stopped
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # of a sweep's trial, by name
    pool: str | None = None  # the folder of the pool in which it was queued
    plan: str | None = None
    workers: int = 0
    attempts: tuple[AttemptRecord, ...] = ()
    host: str = ""  # of the supervisor
    pid: int = 0
    pid_started_s: float = 0.0  # distinguishes the process from a later one with the same pid
    metrics_url: str | None = None
    exit_code: int | None = None
    started: float = 0.0  # of the newest attempt, clock.now()
    ended: float | None = None

    @classmethod
    def load(cls, run_dir: Path | str) -> RunRecord:
        """Read a run directory's record; raises ValueError, saying what is there, where it is not one."""
        run_dir = Path(run_dir)
        try:
            return dataclasses.replace(_fields_of(run_dir / "run.json"), run_dir=run_dir)
        except (FileNotFoundError, NotADirectoryError):
            what = (
                "has no run.json"
                if os.path.isdir(run_dir)
                else "is not a directory"
                if os.path.exists(run_dir)
                else "does not exist"
            )
            raise ValueError(
                f"{str(run_dir)!r} {what}: it is not the directory of a run. Name the one that `paceline run` printed "
                "(runs/... unless --run-dir said otherwise)."
                + (" The record of a run on several hosts is on the host of --head." if _has_attempts(run_dir) else "")
            ) from None
        except PermissionError as error:
            raise ValueError(
                f"{error.filename or run_dir} cannot be read (Permission denied): a run's directory is its user's. "
                "Look at it as that user, or have them open it (chmod -R go+rX)."
            ) from error
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{run_dir / 'run.json'} cannot be read ({error}): it is damaged or of another version."
            ) from error

    @classmethod
    def begin_attempt(
        cls,
        run_dir: Path | str,
        *,
        job: Mapping[str, Any],
        workers: int,
        plan: str | None = None,
        first: int = 1,
        parameters: Mapping[str, Any] | None = None,
        pool: str | None = None,
    ) -> RunRecord:
        """Note that the calling process starts the next attempt in `run_dir` (made if needed), and return the record.

        The attempt's number is `record.attempt`; without a record so far it is `first`. Raises ValueError where another
        supervisor works in the directory, on this host or on another one that shares it.
        """
        run_dir = Path(run_dir)
        make_run_directory(run_dir)
        if not run_lock.hold(run_dir):
            raise ValueError(_in_use(run_dir))
        try:
            before = cls._idle(run_dir)
        except ValueError:
            run_lock.release(run_dir)
            raise
        attempts = before.attempts if before else ()
        number = 1 + max([attempt.attempt for attempt in attempts], default=first - 1)
        started = clock.now()
        # Its workers were lost, and begin again.
        if before and attempts and before.state == RUNNING and before.pid == os.getpid():
            lost = dataclasses.replace(attempts[-1], state="failed", ended=started, exit_code=1)
            attempts = (*attempts[:-1], lost)
        return cls(
            run_dir=run_dir,
            job=dict(job),
            parameters=dict(parameters or {}),
            pool=pool,
            plan=plan,
            workers=workers,
            attempts=(*attempts, AttemptRecord(attempt=number, started=started)),
            host=this_host(),
            pid=os.getpid(),
            pid_started_s=process_started_s(os.getpid()) or 0.0,
            started=started,
        ).save()

    @classmethod
    def take_over(cls, run_dir: Path | str) -> RunRecord:
        """Note that the calling process keeps the record of the attempt under way, whose supervisor was lost, and
        return the record. Raises ValueError if there is none."""
        run_lock.hold(Path(run_dir))  # a lost supervisor that stands still may have it; the register keeps it out
        return dataclasses.replace(
            cls.load(run_dir),
            host=this_host(),
            pid=os.getpid(),
            pid_started_s=process_started_s(os.getpid()) or 0.0,
        ).save()

    @classmethod
    def next_attempt(cls, run_dir: Path | str) -> int:
        """Return the number of the attempt that `begin_attempt` would begin; raises ValueError as it does.

        A host that was not the coordinator's has the files of earlier attempts, and no record of them.
        """
        before = cls._idle(Path(run_dir))
        names = [path.name.removeprefix("attempt_") for path in Path(run_dir).glob("attempt_*")]
        here = max((int(name) for name in names if name.isdecimal()), default=0)
        return 1 + (before.attempt if before else here)

    def end_attempt(self, state: str, exit_code: int) -> RunRecord:
        """Note how the attempt ended ("finished", "failed" or "stopped"); keeps what others have noted meanwhile."""
        now = clock.now()
        last = dataclasses.replace(self.attempts[-1], state=state, ended=now, exit_code=exit_code)
        try:
            return self.changed(state=state, exit_code=exit_code, ended=now, attempts=(*self.attempts[:-1], last))
        finally:
            run_lock.release(self.run_dir)

    def now(self) -> RunRecord:
        """Return the record as the file has it now; this one where it was removed or damaged meanwhile."""
        try:
            return RunRecord.load(self.run_dir)
        except ValueError:
            return self

    def changed(self, **fields: Any) -> RunRecord:
        """Write the record with other values in some fields; the other fields are taken as the file has them now.

        The record of a later start, or of a host that has taken over, stays as it is. One that was removed or damaged
        meanwhile is written anew.
        """
        now = self.now()
        make_run_directory(self.run_dir)
        is_others = now.attempt > self.attempt or (now.host, now.pid) != (self.host, self.pid)
        return now if is_others else dataclasses.replace(now, **fields).save()

    def save(self) -> RunRecord:
        """Write `run.json` and return the record."""
        fields = dataclasses.asdict(self)
        del fields["run_dir"]
        replace_text(self.run_dir / "run.json", json.dumps(fields, indent=1) + "\n")
        return self

    @classmethod
    def _idle(cls, run_dir: Path) -> RunRecord | None:
        """Return the existing record, None if there is none; raise ValueError if another process works on the run."""
        if not os.path.exists(run_dir / "run.json"):
            return None
        before = cls.load(run_dir)
        if before.is_alive() and before.pid != os.getpid():
            raise ValueError(_in_use(run_dir, before))
        return before

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, from 1."""
        return self.attempts[-1].attempt if self.attempts else 0

    def is_here(self) -> bool:
        """Say whether the supervisor ran on this host, so that its process can be looked for."""
        return self.host == this_host()

    def is_alive(self) -> bool:
        """Say whether the supervisor is at work on this host, by its process."""
        return self.state == RUNNING and self.is_here() and is_same_process(self.pid, self.pid_started_s)

    def state_now(self) -> str:
        """Return the state; "lost" if the supervisor was killed and wrote no end (known only on its own host)."""
        return "lost" if self.state == RUNNING and self.is_here() and not self.is_alive() else self.state


def _fields_of(path: Path) -> RunRecord:
    fields = read_object(read_regular(path, MOST_BYTES))
    if "attempts" not in fields:
        raise ValueError("it names no attempts")
    record = fitted(RunRecord, {**fields, "run_dir": ""})
    numbers = [(record.started, record.workers, record.attempt)]
    numbers += [(each.started, 0, each.attempt) for each in record.attempts]
    if not all(
        0 <= when <= LATEST and 0 <= workers <= MOST_WORKERS and 0 <= n <= MOST_WORKERS for when, workers, n in numbers
    ):
        raise ValueError("its times or numbers cannot be")
    return record


def _has_attempts(run_dir: Path) -> bool:
    return any(run_dir.glob("attempt_*"))


def _in_use(run_dir: Path, found: RunRecord | None = None) -> str:
    """Say which process works in a run's directory, and what to do."""
    with contextlib.suppress(ValueError):
        found = found or RunRecord.load(run_dir)
    if found is None or found.state != RUNNING:
        return f"{str(run_dir)!r} is in use: another start of the run has just begun there. Use another --run-dir."
    where = "" if found.is_here() else f" on host {found.host}"
    still = (
        " (it is stopped: kill -CONT or kill -KILL it)" if process_state(found.pid) == "stopped" and not where else ""
    )
    stop = f"paceline stop {shell_text(str(run_dir))}{', on that host' if where else ''}"
    return (
        f"{str(run_dir)!r} is in use: process {found.pid}{where} runs attempt {found.attempt} there{still}. "
        f"Stop it first ({stop}), or use another --run-dir."
    )
