"""Start a job on this host (having met the others, where it has several) and run it to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import LaunchError, PacelineError
from paceline.launch.control import Control
from paceline.launch.head import Head
from paceline.launch.hosts import meet
from paceline.launch.inline import PATIENCE_S, run_inline
from paceline.launch.loop import Loop
from paceline.launch.member import Member
from paceline.launch.outcome import Outcome, interrupted
from paceline.launch.parent import ENTRY, WarmParent
from paceline.launch.place import assign, template
from paceline.launch.signals import Interrupted, Signals
from paceline.launch.supervisor import Observer, Supervisor, Witness
from paceline.plan.job import Job

__all__ = ["launch", "prestart"]


def prestart() -> WarmParent:
    """Start the warm parent, as early as possible: it imports what workers need while the job is being prepared."""
    return WarmParent.start()


def launch(
    job: Job,
    *,
    plan: str | None = None,
    overrides: Sequence[str] = (),
    given: Sequence[str] = (),
    program: Path | None = None,
    run_dir: Path,
    attempt: int,
    observer: Observer,
    met: Callable[[Head | Member], Path] | None = None,
    command_started: float,
    warm: WarmParent | None = None,
) -> Outcome:
    """Run the job's workers of this host, and return how the whole job ended.

    `job.workers` must be known. `program` is the pickled function of `paceline.run(fn)`; workers look for it as
    RUN/attempt_n/program.pkl. `met` is called when all hosts are there and before anything is written, with this
    host's side of the job: it knows the head's `attempt` and `run_dir`, and `met` returns the run's directory on this
    host (without it, `run_dir`). `warm`, where given, is used and closed. Blocks until every process is gone. While it
    runs, Ctrl-C, SIGTERM and SIGHUP end the workers and are told in the Outcome (but for launcher "inline", where
    Ctrl-C is worker 0's). Raises LaunchError where the job could not be started; a failure after that is an Outcome.
    """
    is_inline = job.launcher == "inline"
    with contextlib.ExitStack() as stack:
        if warm is not None:
            stack.callback(warm.close)
        signals = Signals()
        if not is_inline:
            stack.enter_context(signals)
        loop = stack.enter_context(contextlib.closing(Loop()))
        parent = _parent(job, warm)
        if parent is not None:
            stack.callback(parent.close)
        witness = Witness(observer, signals)
        try:
            side = meet(
                job,
                plan=plan,
                attempt=attempt,
                run_dir=str(run_dir),
                loop=loop,
                say=witness.say,
                signals=signals,
            )
        except Interrupted as early:
            return interrupted(early.signum, ())
        stack.callback(side.close)
        if met is not None:
            run_dir = _told(side, met)
        run_dir = run_dir.absolute()
        _bring(program, run_dir / f"attempt_{side.attempt}" / "program.pkl")
        alike = template(
            dataclasses.replace(job, timeout_s=max(job.timeout_s, PATIENCE_S)) if is_inline else job,
            host=side.host,
            host_index=side.host_index,
            slots=side.slots,
            address=side.address,
            run_dir=run_dir,
            attempt=side.attempt,
            command_started=command_started,
            plan=plan,
            overrides=overrides,
            given=given,
        )
        stack.callback(Control(loop, side.asked).close)
        assignments = assign(alike, side.ranks)
        supervisor = Supervisor(
            assignments, template=alike, side=side, parent=parent, loop=loop, observer=witness, signals=signals
        )
        if is_inline:
            entry = warm.entry if warm is not None else ENTRY
            return run_inline(supervisor, assignments[0], entry=entry, loop=loop, signals=signals)
        return supervisor.run()


def _told(side: Head | Member, met: Callable[[Head | Member], Path]) -> Path:
    """Call `met`; where it fails, the other hosts are told before the error goes on."""
    try:
        return met(side)
    except PacelineError as error:
        side.abandon(str(error))
        raise


def _parent(job: Job, warm: WarmParent | None) -> WarmParent | None:
    """The warm parent to fork from; None where worker 0 is alone in this process."""
    if job.launcher == "inline" and job.workers == 1:
        if warm is not None:
            warm.close()
        return None
    return warm if warm is not None else WarmParent.start()


def _bring(program: Path | None, place: Path) -> None:
    """Have the program's file where the workers look for it."""
    if program is None or program.absolute() == place:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(program, place)
    except OSError as error:
        raise LaunchError(f"Cannot copy the program {program} to {place}: {error.strerror}.") from error
