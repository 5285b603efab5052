"""`paceline.run(fn)`, called by a script or a notebook, and `start` for the command.

One of three things happens: this process is a worker already and becomes it; torchrun, srun or mpirun started a world
and this process joins it; or this process is the supervisor and starts the workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline import clock, config, environment
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.errors import LaunchError, PlanError, WorkerError, WorkersLostError
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.io.standard_streams import open_missing_streams
from paceline.plan import CommandPlan, Job, Plan, read_plan
from paceline.plan.command_plan import auto_base
from paceline.plan.job import AUTO
from paceline.runs.attempt import Attempt
from paceline.runs.attempt_failures import error_from_failures
from paceline.runs.attempt_start import qualified_name, wait_for_orphans
from paceline.runs.auto_plan import choose_plan
from paceline.runs.go_on import command_of_words, script_command
from paceline.runs.messages import tell, tell_go_on, tell_of_new_coordinator
from paceline.runs.own_frames import folds_own_frames
from paceline.runs.own_script import is_program, own_script
from paceline.runs.restart_loop import run_with_restarts
from paceline.runs.run_loggers import RunLoggers, check_trackers
from paceline.runs.run_predictor import RunPredictor, run_predictor
from paceline.runs.run_uploads import RunUploads, check_remote_dir
from paceline.runs.settled_job import settled_job

if TYPE_CHECKING:
    from paceline.launch.engines.engine import Engine
    from paceline.monitor.export.run_logger import RunLogger
    from paceline.worker.worker import Worker
    from paceline.world_detection import World

__all__ = ["run", "start"]

T = TypeVar("T")

_calls = itertools.count()  # of `run` in this process, outside of workers

JOB_FIELDS = frozenset(field.name for field in dataclasses.fields(Job)) - {
    "program",
    "args",
    "run_as",
    "run_for",
    "servers",
    "restart_lost",
}


@folds_own_frames
def run(
    function: Callable[[Worker], T],
    *,
    plan: Plan | str | None = None,
    workers: int | None = None,
    run_dir: str | Path | None = None,
    fresh: bool | None = None,
    max_steps: int | None = None,
    save_every: int | None = None,
    save_every_s: float | None = None,
    save_at_end: bool | None = None,
    keep: int | None = None,
    remote_dir: str | None = None,
    remote_wait_s: float | None = None,
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] | None = None,
    threads: int | None = None,
    on: str | Engine | None = None,
    hosts: int | str | None = None,
    head: str | None = None,
    slots: int | None = None,
    token_file: str | None = None,
    private_network: bool | None = None,
    launcher: Literal["local", "inline"] | None = None,
    timeout_s: float | None = None,
    silence_s: float | None = None,
    patience_s: float | None = None,
    grace_s: float | None = None,
    balance: bool | None = None,
    noise_scale: bool | None = None,
    show: Literal["first", "all"] | None = None,
    metrics_port: int | None = None,
    metrics_host: str | None = None,
    tensorboard: bool | None = None,
    log: str | Sequence[str] | None = None,
    loggers: Sequence[RunLogger] = (),
    cluster: str | None = None,
    capture_dir: str | None = None,
    **unknown: Any,
) -> T:
    """Run `function(worker)` on every worker of a job, and return worker 0's value.

    An elastic run returns the value of the first worker that is present at its end. Inside a worker, and under
    torchrun, srun or mpirun, the call becomes that worker. It then returns its own value, and exits
    if a peer has failed. On the other hosts of a job with several hosts it returns None.

    Example::

        def start(train):
            return paceline.run(train, workers=4, plan="replicas=4+batch(size=64)", run_dir="runs/first")

    Every parameter but `plan` and `on` is a field of `Job`. None means that the script does not set it: then the
    command's value, or the default in brackets, counts. What the command sets wins over the script.

    :param function: called as `function(worker)` on every worker; functions of notebook cells work.
    :param plan: what is computed: a `Plan`, or its text. "auto", or "auto+batch(size=64)": the script is looked at, and
        the best layouts, micro-batches and recompute for `workers` are run for some steps here; the fastest is taken.
    :param workers: processes of the whole job, over all hosts (the plan's replicas times the workers of one, or 1).
    :param run_dir: where the run's files lie (`runs/<program>-<date>-<time>`); one with checkpoints is continued.
    :param fresh: start over in a `run_dir` that holds checkpoints (False).
    :param max_steps: stop after this global step, counted over all attempts.
    :param save_every: steps between two checkpoints (checkpoints are saved by time).
    :param save_every_s: without `save_every`, least seconds between two checkpoints; steps wait for them at most 1 % of
        the time; 0: only `worker.save()` saves (300).
    :param save_at_end: save one more checkpoint after the last step (True).
    :param keep: how many of the newest complete checkpoints are kept (3).
    :param remote_dir: an address in object storage, such as "s3://bucket/runs/first": checkpoints are copied there
        behind training, and a `run_dir` without newer ones continues from there (none).
    :param remote_wait_s: seconds at the run's end for checkpoints that are not there yet (600).
    :param device: "cpu", "cuda", or "auto": a GPU for each worker if the host has enough, else the CPU ("auto"). With
        "cuda-shared" several workers may share a GPU: to try layouts, since their tensors go through the host.
    :param threads: CPU threads of each worker (cores of the host divided by the workers on it).
    :param on: an engine that starts the hosts: "slurm", "ssh", or one with settings, `Slurm(partition="gpu")`. The call
        gives this script to it, and follows the run to its end; then it returns None, or exits with the run's status.
        On the hosts, where the script runs again, `on` does nothing. From a notebook only Ray takes the function
        itself, and its value comes back.
    :param hosts: how many hosts take part; the same command is started once on each, unless `on` does that (1). With
        on="ssh" their names, "a,b:4".
    :param head: HOST:PORT at which the hosts meet, or "auto": in `run_dir`, on a disk that they share; needed with
        several hosts.
    :param slots: workers of this host, where the hosts are not alike (an even share).
    :param token_file: file with the job's secret token, which is read from PACELINE_TOKEN otherwise.
    :param private_network: nobody else reaches the network between the hosts: tensors travel in the clear (False).
    :param launcher: "local", or "inline": worker 0 runs in this process, for pdb ("local").
    :param timeout_s: seconds that a worker waits for its peers before the run fails (600).
    :param silence_s: seconds of silence after which a host, and in elastic runs a worker, counts as lost (10).
    :param patience_s: seconds that an elastic run with too few replicas waits for more before it saves and ends (60).
    :param grace_s: seconds after SIGTERM in which workers finish the step, save and leave (30).
    :param balance: give persistently slower workers fewer micro-batches of each step (False).
    :param noise_scale: measure the gradient noise scale (True).
    :param show: whose standard output the console shows: "first" (worker 0's) or "all" ("first").
    :param metrics_port: port of a Prometheus endpoint; 0: any free port (no endpoint).
    :param metrics_host: address that the endpoint listens on ("127.0.0.1").
    :param tensorboard: write TensorBoard files (True).
    :param log: experiment trackers that get the run's numbers: "wandb", "mlflow", or both (none).
    :param loggers: trackers of your own, objects with the methods of `RunLogger`; they stay in the process that
        supervises the run.
    :param cluster: a cluster of the catalogue, or a cluster file ("lab.toml"), on which the run is. What a step takes
        there is predicted, and compared with the run's steps in its receipt. "off": nothing is (`cluster.toml` in the
        working directory, if there is one).
    :param capture_dir: write losses, gradients and weights of each step there, for a comparison.
    :raises PlanError: the plan or the job cannot work; before anything starts.
    :raises LaunchError: workers could not be started, or hosts did not find each other.
    :raises WorkerError: a worker failed; it has the worker's rank, host, step and traceback.
    :raises WorkersLostError: workers were only taken away; a script that does not catch it ends with 76.
    """
    engine = None
    if on is not None:
        from paceline.launch.engines.catalog import host_count, read_engine  # most runs need no engine

        engine = read_engine(on, hosts=hosts)
        hosts = None if hosts is None else int(host_count(engine, hosts))
    log = (log,) if isinstance(log, str) else log
    said = {name: value for name, value in locals().items() if name in JOB_FIELDS and value is not None}
    fields = said | {
        name: value for name, value in unknown.items() if value is not None
    }  # an unknown name is refused below, with the one that was meant
    if "run_dir" in fields:
        fields["run_dir"] = str(run_dir)
    if not callable(function):
        raise TypeError(f"paceline.run() needs a function of one argument, the worker, not a {type(function).__name__}")
    if not isinstance(plan, (Plan, str, type(None))):
        raise TypeError(f"paceline.run(plan={plan!r}): give a Plan, or its text")
    meeting = {"head": AUTO, "run_dir": str(run_dir or "")} if engine is not None and head is None else {}
    wanted = config.read(Job, {**meeting, **fields})
    chosen = None if plan is None else read_plan(plan)
    if environment.is_preloading():
        module = sys.modules.get(function.__module__)
        raise PlanError(
            f"paceline.run() was called by an import: {getattr(module, '__file__', function.__module__)} was taken for "
            "a module that workers import, and would start a run in each run. Call it below "
            'if __name__ == "__main__":, and rename a file that has the name of a module of Python or of a library.'
        )
    own = environment.assignment()
    if own is not None:
        from paceline.worker.session import has_run, run_worker  # inside a worker torch is there already

        if has_run(own):
            raise PlanError(
                "The script calls paceline.run() a second time, but one run has one directory, one count of steps and "
                "one set of checkpoints. Start it with `python`, where each call is a run, or make it two scripts."
            )
        return run_worker(function, own, plan=chosen, fields=fields)
    open_missing_streams()
    if wanted.log:
        check_trackers(wanted)
    check_remote_dir(wanted)
    world = environment.detect()
    if engine is not None and world is None and environment.engine() is None:
        from paceline.runs.run_on_engine import run_on_engine

        return run_on_engine(engine, function, wanted, plan=chosen, fields=fields, given=tuple(said), say=tell)
    if auto_base(plan) is not None:
        if world is not None or engine is not None or environment.engine() is not None:
            where = world.source if world is not None else "an engine"
            raise PlanError(f"plan='auto' runs plans on this machine, and {where} has started this one: give a plan.")
        chosen = choose_plan(own_script(), wanted, args=sys.argv[1:], say=tell)
    is_first, names_dir = next(_calls) == 0, run_dir is not None
    if is_first and (directory := environment.run_dir()) is not None:  # of the command that goes on with a run
        fields = {**fields, "run_dir": directory, "fresh": False}
        wanted, names_dir = config.read(Job, fields), False
    if world is not None and not world.is_for_each_host(wanted.hosts):
        return _join(world, function, wanted, chosen, fields, is_first=is_first, loggers=loggers)
    return _run_function(function, wanted, chosen, fields, is_first=is_first, names_dir=names_dir, loggers=loggers)


def start(
    job: Job,
    *,
    warm: WarmParent,
    plan: CommandPlan,
    given: Sequence[str] = (),
    command_started: float,
    words: Sequence[str] = (),
) -> int:
    """Run a script for the command, whose arguments are `words`; closes `warm` and returns the exit status."""
    with warm, contextlib.ExitStack() as stack:
        script = Path(job.program)
        settled = settled_job(job, plan, script=script)
        predictor = stack.enter_context(_predictor(settled, plan, script=script, args=job.args))
        wait_for_orphans(settled, say=tell)
        uploads = stack.enter_context(RunUploads(settled))
        uploads.begin(tell)
        attempt = Attempt(
            settled,
            plan=plan,
            given=given,
            command_started=command_started,
            follow=job.run_dir is None,
            predictor=predictor,
            loggers=RunLoggers(settled, arguments=job.args),
            uploads=uploads,
        )
        attempt, outcome = run_with_restarts(attempt, warm, listener=_given_listener())
    if words and outcome.state != "finished" and outcome.exit_code != 2:
        script = Path(job.program)
        command = command_of_words(words, attempt.run_dir, script=script, names_dir=job.run_dir is not None)
        tell_of_new_coordinator(attempt, outcome.exit_code)
        tell_go_on(command, outcome.exit_code, is_there=attempt.run_dir.exists())
    return outcome.exit_code


def _predictor(job: Job, plan: CommandPlan, *, script: Path | None, args: Sequence[str]) -> RunPredictor:
    return run_predictor(job, plan, script=script, args=args, drills=environment.fault_programme() is not None)


def _given_listener() -> socket.socket | None:
    """The socket at which this host is to be the coordinator, where a driver has started it as the first."""
    number = environment.given_listener()
    return None if number is None else socket.socket(fileno=number)


def _run_function(
    function: Callable[[Worker], T],
    job: Job,
    plan: Plan | None,
    fields: Mapping[str, Any],
    *,
    is_first: bool,
    names_dir: bool,
    loggers: Sequence[RunLogger],
) -> T:
    """Be the supervisor of workers that run a function of this process. `names_dir`: its script names the directory."""
    started = clock.now()
    with WarmParent.start() as warm, contextlib.ExitStack() as stack:  # at once: it imports what workers need meanwhile
        own_plan = CommandPlan(whole=plan)
        settled = settled_job(job, own_plan, script=own_script())
        script = own_script() if is_first else None  # a look at it ends at its first run
        predictor = stack.enter_context(_predictor(settled, own_plan, script=script, args=sys.argv[1:]))
        wait_for_orphans(settled, say=tell)
        uploads = stack.enter_context(RunUploads(settled))
        uploads.begin(tell)
        attempt = Attempt(
            settled,
            plan=own_plan,
            command_started=started,
            follow=job.run_dir is None,
            function=(function, fields),
            predictor=predictor,
            loggers=RunLoggers(settled, loggers, arguments=sys.argv[1:] if is_program() else ()),
            uploads=uploads,
        )
        try:
            attempt, outcome = run_with_restarts(attempt, warm, listener=_given_listener())
        except LaunchError as error:
            if not error.is_accident or not is_program():
                raise
            tell(str(error))
            raise WorkersLostError(str(error), worker=0, code=TOO_FEW) from error
        finally:
            if job.launcher == "inline":
                environment.leave()  # this process was worker 0, and is no longer
    if outcome.state != "finished" and outcome.exit_code != 2:
        tell_of_new_coordinator(attempt, outcome.exit_code)
        tell_go_on(
            script_command(attempt.run_dir, names_dir=names_dir, is_first=is_first),
            outcome.exit_code,
            is_there=attempt.run_dir.exists(),
        )
    if outcome.state == "stopped":
        if outcome.exit_code in (128 + signal.SIGINT, PREEMPTED) and not is_program():
            raise KeyboardInterrupt(outcome.reason)
        raise SystemExit(outcome.exit_code)
    if outcome.state == "failed":
        error = error_from_failures(attempt.failures)
        if outcome.exit_code == TOO_FEW and isinstance(error, WorkerError) and is_program():
            tell(str(error))
            raise WorkersLostError.like(error, code=TOO_FEW)
        raise error
    return attempt.value(outcome)


def _join(
    world: World,
    function: Callable[[Worker], T],
    job: Job,
    plan: Plan | None,
    fields: Mapping[str, Any],
    *,
    is_first: bool,
    loggers: Sequence[RunLogger],
) -> T:
    """Become a worker of a world that another launcher started, and run the function."""
    from paceline.runs.join_world import joining_world
    from paceline.worker.session import run_worker

    with joining_world(world, job, plan, program=qualified_name(function), is_first=is_first, loggers=loggers) as (
        place,
        notice,
    ):
        return run_worker(function, place.assignment, plan=plan, fields=fields, store=place.store, notice=notice)
