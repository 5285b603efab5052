"""`paceline.run(fn, on=...)`: an engine's hosts run this process's script again, or, from a notebook, the function."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.errors import WorkerError
from paceline.launch.engines.engine import Engine, Say
from paceline.launch.engines.sent_function import SentFunction, read_outcome
from paceline.launch.engines.submission import Submission
from paceline.plan import CommandPlan, Job, Plan
from paceline.runs.own_script import is_program, own_script
from paceline.runs.submit import prepare, settled, submit
from paceline.runs.unpicklable import pickled_function

__all__ = ["run_function_on_engine", "run_on_engine"]

OF_SCRIPTS = ("head", "slots", "fresh", "token_file")  # the script says the rest again on each host
OF_ENGINES = ("head", "slots", "hosts", "workers", "run_dir", "token_file")  # said by the engine on each host


def run_on_engine(
    engine: Engine,
    function: Callable[..., Any],
    job: Job,
    *,
    plan: Plan | None,
    fields: Mapping[str, Any],
    given: Sequence[str],
    say: Say,
) -> Any:
    """Give this process's script, or in a notebook the function, to an engine, and follow the run. `fields`: the
    arguments of `paceline.run`, those in `given` by name. Return the function's value, None of a script; raise
    SystemExit where a script does not finish, and what `paceline.run` raises where a function does not.
    """
    script = own_script()
    if script is None or not is_program():
        return run_function_on_engine(engine, function, job, plan=plan, fields=fields, given=given, say=say)
    job = dataclasses.replace(job, program=str(script), args=tuple(sys.argv[1:]))
    job = settled(engine, job, CommandPlan(whole=plan), script=script)
    kept = tuple(name for name in given if name in OF_SCRIPTS)
    submission = prepare(engine, job, plan=CommandPlan(whole=plan), given=kept)
    code = submit(engine, dataclasses.replace(submission, plan=CommandPlan()), say=say)
    if code != 0:
        raise SystemExit(code)
    return None


def run_function_on_engine(
    engine: Engine,
    function: Callable[..., Any],
    job: Job,
    *,
    plan: Plan | None,
    fields: Mapping[str, Any],
    given: Sequence[str],
    say: Say,
    start: Callable[[Submission], int] | None = None,
) -> Any:
    """Send a function to an engine's hosts; see `run_on_engine`. `start` submits it and returns the exit status, where
    that is not as usual."""
    kept = {name: value for name, value in fields.items() if name not in OF_ENGINES}
    sent = SentFunction(
        name=str(getattr(function, "__name__", type(function).__name__)),
        pickled=pickled_function(function, kept | {"plan": plan}),
    )
    job = settled(engine, job, CommandPlan(whole=plan), script=None)
    submission = prepare(engine, job, plan=CommandPlan(whole=plan), given=given, function=sent)
    code = submit(engine, submission, say=say) if start is None else start(submission)
    value, error = read_outcome(submission.run_dir / "engine")
    if code in (128 + signal.SIGINT, PREEMPTED):
        raise KeyboardInterrupt(f"The run was stopped, and has saved: go on with run_dir={job.run_dir!r}.")
    if code == 0:
        return value
    if error is not None:
        raise error
    reason = "The hosts were lost" if code == TOO_FEW else f"The run has ended with exit status {code}"
    raise WorkerError(f"{reason}: what they printed is in {submission.run_dir / 'engine'}.", worker=0, exit_code=code)
