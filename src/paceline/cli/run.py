"""`paceline run`: starts a script or a job file on many workers; `--dry-run` prints what would be started.

The options are the fields of Job, one each; a field's annotation says how its value is read. `OPTIONS` adds only the
help.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import clock, config, environment
from paceline.cli import pool
from paceline.cli.arguments import Commands, Parser, add_command
from paceline.errors import PlanError
from paceline.plan import CommandPlan, Job, Plan, read_job_file
from paceline.plan.command_plan import auto_base
from paceline.plan.job import AUTO, OWN_FLAGS, flag_of, read_engine_table, read_plan_names
from paceline.plan.own_programs import program_here
from paceline.plan.program_check import check_program
from paceline.plan.program_tasks import refuse_plan, settled_tasks, tasks_text
from paceline.plan.script_scan import auto_plan_of_script, workers_of_script

if TYPE_CHECKING:
    from paceline.launch.engines.engine import Engine

__all__ = ["OPTIONS", "add", "engine_of", "job_of", "run", "show_dry_run"]

# Job field: what stands for the value in the help, and the help. "program" and "args" are the positional arguments.
OPTIONS = {
    "run_as": (
        "FRAMEWORK",
        "run an unmodified program of another framework, with Paceline in its place: deepspeed, horovod",
    ),
    "run_for": (
        "FRAMEWORK",
        "start, watch and restart an unmodified program that another framework distributes by itself: tensorflow",
    ),
    "workers": (
        "N",
        "workers of the whole job, over all hosts (default: what the script asks for, the plan's most, or 1)",
    ),
    "servers": (
        "N",
        "with --for: parameter servers, beside the workers and a chief (default: none, and no chief)",
    ),
    "launcher": (
        "NAME",
        "local: every worker is a process; inline: worker 0 runs in this process, for pdb (default: local)",
    ),
    "hosts": (
        "N",
        "hosts of the job; start the same command once on each, or have an engine do it (--on); with --on ssh also "
        "their names, with the workers of each: a,b:4 (default: 1)",
    ),
    "head": (
        "HOST:PORT",
        "where several hosts meet: an address of one of them, the same on all; or auto: in a shared --run-dir",
    ),
    "slots": ("N", "workers of this host, where hosts are not alike (default: an even share)"),
    "token_file": ("FILE", "file with the job's token, which several hosts need (default: what PACELINE_TOKEN holds)"),
    "private_network": ("", "nobody else reaches the network between the hosts: do not encrypt the workers' traffic"),
    "run_dir": (
        "DIR",
        "directory of the run; one that has checkpoints is continued (default: runs/<program>-<date>-<time>)",
    ),
    "fresh": ("", "start over, even if the run directory has checkpoints"),
    "save_every": ("STEPS", "save a checkpoint every so many steps (default: by time)"),
    "save_every_s": (
        "SECONDS",
        "without --save-every: save every so many seconds, at most a hundredth of the time; 0: never (default: 300)",
    ),
    "save_at_end": ("", "save no checkpoint after the last step"),
    "keep": ("N", "newest complete checkpoints that are kept (default: 3)"),
    "remote_dir": (
        "ADDRESS",
        "copy checkpoints to object storage, and continue from there: s3://bucket/path, gs://, az:// (default: do not)",
    ),
    "remote_wait_s": ("SECONDS", "at the end, so long for checkpoints that are not there yet (default: 600)"),
    "timeout_s": ("SECONDS", "how long a worker waits for the others before it gives up (default: 600)"),
    "restart_lost": (
        "",
        "a program with a loop of its own: after a lost worker start all again, up to three times without a new step",
    ),
    "balance": ("", "give persistently slower workers fewer micro-batches of each step"),
    "noise_scale": ("", "do not measure the gradient noise scale"),
    "silence_s": ("SECONDS", "a host not heard of for so long is lost, and in elastic runs a worker (default: 10)"),
    "patience_s": ("SECONDS", "elastic runs: below the plan's least, wait so long, then save and end (default: 60)"),
    "grace_s": ("SECONDS", "after SIGTERM, so long to finish the step, save and leave (default: 30)"),
    "device": (
        "WHERE",
        "auto: a GPU for each worker if the host has enough, else the CPU; or cpu, cuda, or cuda-shared: workers may "
        "share a GPU, to try layouts (default: auto)",
    ),
    "threads": ("N", "CPU threads of each worker (default: cores of the host / workers on it)"),
    "metrics_port": ("PORT", "serve metrics for Prometheus on this port; 0: any free one (default: do not)"),
    "metrics_host": ("ADDRESS", "address on which metrics are served (default: 127.0.0.1, this machine only)"),
    "tensorboard": ("", "write no TensorBoard files"),
    "log": ("NAME", "log to an experiment tracker: wandb or mlflow; may be given for each (default: none)"),
    "show": ("WHOSE", "whose standard output the console shows: first (worker 0's) or all (default: first)"),
    "max_steps": ("STEPS", "stop after this step"),
    "cluster": (
        "NAME|FILE",
        "predict the steps of this cluster, and compare them with the run's; off: do not (default: cluster.toml, if "
        "there is one here)",
    ),
    "capture_dir": ("DIR", "write losses, gradients and weights there, for comparison (default: do not)"),
}

EXAMPLES = """\
  paceline run train.py --workers 4
  paceline run train.py --workers 4 --plan "cast(dtype=bf16)+batch(size=64)" --lr 0.1
  paceline run job.toml --set plan.batch.size=64 --set keep=5
  paceline run train.py --launcher inline --workers 2       then breakpoint() works in worker 0
  paceline run train.py --on slurm --hosts 4 --workers 32 --dry-run
  paceline run train.py --on "slurm(partition=gpu,time=4:00:00)" --hosts 4 --workers 32

Options after the script's name that are not ours go to the script. One that resembles an option of ours is refused as a
slip, unless the script's text has it (parser.add_argument("--slow"), beside our --show), or it stands after "--".
Output, checkpoints and metrics of all workers are in the run directory. How to write a plan: `paceline plan --help`.
"""


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    parser = add_command(
        commands,
        "run",
        summary="run a script or a job file on many workers",
        description="Run a training script, or the job that a TOML file describes, on many workers.",
        usage="paceline run [options] SCRIPT.py|JOB.toml [options] [the script's arguments] [-- more of them]",
        examples=EXAMPLES,
    )
    parser.add_argument("program", metavar="SCRIPT.py|JOB.toml", help="a Python script, or a job file")
    parser.add_argument(
        "--plan",
        metavar="TEXT",
        help="the plan, as one line of text; wins over the script's and the job file's. auto: the fastest, chosen by "
        "short runs on this machine",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one value of the plan (plan.batch.size=64) or of the job (keep=5); may be given many times",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the job, the plan and what would be started or sent, and exit"
    )
    parser.add_argument(
        "--on",
        metavar="ENGINE",
        help="have an engine start the job on its hosts, and follow it: ssh, slurm, kubernetes or ray, also with "
        'settings: "slurm(partition=gpu)"; single ones by --set engine.partition=gpu',
    )
    parser.add_argument("--detach", action="store_true", help="with --on or --pool: return once the job is submitted")
    add_job_options(parser)
    pool.add_options(parser)
    parser.set_defaults(run=_run_or_queue)


def add_job_options(parser: Parser, *, without: Sequence[str] = ()) -> None:
    """Declare one option for each Job field of the table, but for those `without` which the command does; values stay
    text, absent options are None.
    """
    group = parser.add_argument_group("job")
    for field in dataclasses.fields(Job):
        if field.name not in OPTIONS or field.name in without:
            continue
        metavar, text = OPTIONS[field.name]
        if isinstance(field.default, bool):
            word = str(not field.default).lower()
            group.add_argument(flag_of(field), dest=field.name, action="store_const", const=word, help=text)
        elif typing.get_origin(config.annotations_of(Job)[field.name]) is tuple:
            group.add_argument(flag_of(field), dest=field.name, metavar=metavar, action=Appended, help=text)
        else:
            group.add_argument(flag_of(field), dest=field.name, metavar=metavar, help=text)


class Appended(argparse.Action):
    """Collects the values of an option that may be given several times, as the text of a tuple: "wandb,mlflow"."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def _run_or_queue(arguments: argparse.Namespace) -> int:
    """Start the job, or queue it with --pool; returns the run's exit status."""
    if arguments.pool is not None:
        return _queue(arguments)
    for option in ("priority", "deadline_s", "batch_grows"):
        if getattr(arguments, option) is not None:
            raise PlanError(f"--{option.replace('_', '-')} is about a run in a pool: add --pool POOL.")
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Start the job, or show it with --dry-run; returns the run's exit status."""
    arguments.program = program_here(arguments.program)
    on, arguments.overrides = engine_of(arguments)
    if on is not None:
        if _settle_auto(arguments):
            raise PlanError(
                "plan='auto' runs plans on this machine. Measure an engine's hosts by paceline doctor --on ..., choose "
                "with paceline plan SCRIPT --cluster FILE, and give the plan."
            )
        return _run_on(on, arguments)
    if arguments.detach:
        raise PlanError("--detach leaves a job with an engine or in a pool: add --on slurm, or --pool POOL.")
    is_auto = _settle_auto(arguments)
    job, plan, given = job_of(arguments)
    if job.run_for is None:
        check_program(Path(job.program), plan, run_as=job.run_as)
    refuse_plan(job, plan)
    if arguments.dry_run:
        return show_dry_run(job, plan=plan)
    _refuse_in_world(job)
    if job.log:
        from paceline.runs.run_loggers import check_trackers

        check_trackers(job)
    if job.remote_dir:
        from paceline.runs.run_uploads import check_remote_dir

        check_remote_dir(job)
    if is_auto:
        plan = _chosen_plan(job, plan, arguments.overrides)
        arguments.command_started = clock.now()  # the run's start-up is what comes from here on
    from paceline.launch.fork.warm_parent_client import WarmParent

    with WarmParent.start_for(job) as warm:  # before the next import: it imports torch meanwhile
        from paceline.runs.run import start

        return start(
            job, warm=warm, plan=plan, given=given, command_started=arguments.command_started, words=arguments.words
        )


def _queue(arguments: argparse.Namespace) -> int:
    """Queue the run in a pool, and follow it unless --detach; returns its exit status."""
    arguments.program = program_here(arguments.program)
    on, arguments.overrides = engine_of(arguments)
    if on is not None:
        raise PlanError("--pool and --on exclude each other: start `paceline pool` within the engine's allocation.")
    if _settle_auto(arguments):
        raise PlanError(
            "plan='auto' measures this machine while the pool's runs use it: choose first, then give the plan."
        )
    job, plan, _ = job_of(arguments)
    if job.run_for is not None:
        raise PlanError(
            f"A pool resizes runs by their plans, and a program of {job.run_for} has none: start it without --pool."
        )
    if arguments.dry_run:
        return show_dry_run(job, plan=plan)
    from paceline.pool.replica_range import replica_range

    least, most, each = replica_range(Path(job.program), plan, workers=job.workers, args=job.args, say=_say)
    batch = plan.whole.batch if plan.whole is not None else None
    return pool.queue(arguments, job, batch=batch, least=least, most=most, workers_each=each)


def _settle_auto(arguments: argparse.Namespace) -> bool:
    """Return whether the command, or where it has no plan, the script's own call, asks for plan="auto". What stands
    behind "auto+" becomes the command's plan.
    """
    if arguments.plan is not None:
        base = auto_base(arguments.plan)
        if base is not None:
            arguments.plan = arguments.plan.partition("+")[2] or None
        return base is not None
    return not arguments.program.endswith(".toml") and auto_plan_of_script(Path(arguments.program)) is not None


def _chosen_plan(job: Job, plan: CommandPlan, overrides: Sequence[str]) -> CommandPlan:
    from paceline.runs.auto_plan import choose_plan

    if job.workers is None:
        job = dataclasses.replace(job, workers=workers_of_script(Path(job.program), args=job.args, say=_say))
    return CommandPlan(
        whole=choose_plan(
            Path(job.program),
            job,
            base=plan.whole,
            overrides=[] if plan.whole is not None else [text for text in overrides if _is_for_plan(text)],
            args=job.args,
            say=_say,
        ),
        is_chosen=True,
    )


def _say(text: str) -> None:
    print(f"paceline: {text}", flush=True)


def engine_of(arguments: argparse.Namespace) -> tuple[Engine | None, list[str]]:
    """Return the engine that command and job file name, and the overrides that are not its settings."""
    words: list[str] = arguments.overrides
    settings = [word.partition(".")[2] for word in words if word.strip().startswith("engine.")]
    others = [word for word in words if not word.strip().startswith("engine.")]
    said = arguments.on
    if said is None and arguments.program.endswith(".toml") and Path(arguments.program).is_file():
        said = read_engine_table(Path(arguments.program))
    if said is None:
        if settings:
            raise PlanError(f"--set engine.{settings[0]} needs an engine: add --on slurm, for example.")
        return None, others
    from paceline.launch.engines.catalog import read_engine

    return read_engine(said, settings=settings, hosts=arguments.hosts), others


def _run_on(engine: Engine, arguments: argparse.Namespace) -> int:
    """Submit the job, or show what would be sent."""
    from paceline.launch.engines.catalog import host_count
    from paceline.runs.submit import prepare, settled, show, submit

    if arguments.hosts is not None:
        arguments.hosts = host_count(engine, arguments.hosts)
    job, plan, given = job_of(arguments, head=AUTO)
    refuse_plan(job, plan)
    job = settled(engine, job, plan, script=Path(job.program))
    submission = prepare(engine, job, plan=plan, given=given, detach=arguments.detach)
    if arguments.dry_run:
        print(show(engine, submission))
        return 0
    return submit(engine, submission, say=lambda text: print(f"paceline: {text}", flush=True), detach=arguments.detach)


def _refuse_in_world(job: Job) -> None:
    """Raise PlanError where another launcher started this command once for each worker."""
    world = environment.detect()
    if world is not None and world.workers > 1 and not world.is_for_each_host(job.hosts):
        raise PlanError(
            f"{world.source} started this command {world.workers} times, and each would start workers of its own. Have "
            f"it start the script itself (... python {job.program}), or this command once on each host, with "
            f"--hosts {world.workers} and --head. To have {world.source} ignored, set PACELINE_WORLD=none."
        )


def job_of(arguments: argparse.Namespace, *, head: str | None = None) -> tuple[Job, CommandPlan, tuple[str, ...]]:
    """Return what command and job file say: the job, the plan, and the names of the Job fields that they set. `head`:
    where hosts meet if neither says it.
    """
    fields = config.annotations_of(Job)
    changes: dict[str, Any] = {}
    for name in OPTIONS:
        text = getattr(arguments, name)
        if text is not None:
            changes[name] = config.parse_value(
                text, fields[name], path=OWN_FLAGS.get(name, f"--{name.replace('_', '-')}"), owner=Job, name=name
            )
    overrides = tuple(text for text in arguments.overrides if _is_for_plan(text))
    for text in arguments.overrides:
        if text not in overrides:
            name, value = _job_override(text, fields)
            changes[name] = value
    if arguments.script_args:
        changes["args"] = arguments.script_args
    job, plan, given = _read_program(Path(arguments.program), changes, head=head)
    names = read_plan_names(Path(arguments.program)) if arguments.program.endswith(".toml") else None
    if arguments.plan is not None:
        plan, names = Plan.parse(arguments.plan), Plan.names_in(arguments.plan)
    return job, CommandPlan.of(plan, overrides, given=names), given


def _read_program(path: Path, changes: dict[str, Any], *, head: str | None) -> tuple[Job, Plan | None, tuple[str, ...]]:
    if not path.is_file():
        raise PlanError(
            f"There is no file {path}. Name a Python script or a job file (.toml), for example: paceline run train.py"
        )
    defaults: dict[str, Any] = {} if head is None else {"head": head, "run_dir": ""}  # settled later
    if path.suffix != ".toml":
        job_fields: dict[str, Any] = {"program": str(path), **changes}
        return Job(**defaults | job_fields), None, tuple(job_fields)
    job, plan, given = read_job_file(path, changes, defaults)
    if not job.program:
        raise PlanError(f'{path} does not say what to run. Add a line: program = "train.py"')
    if not Path(job.program).is_file():
        raise PlanError(
            f"{path} names the program {job.program}, which does not exist. "
            "A relative path starts at the job file's folder."
        )
    return job, plan, given


def _is_for_plan(override: str) -> bool:
    return override.partition("=")[0].strip().partition(".")[0] == "plan"


def _job_override(override: str, fields: dict[str, Any]) -> tuple[str, Any]:
    """Return the Job field that an override such as "keep=5" or "job.keep=5" sets, and its value."""
    dotted, equals, text = override.partition("=")
    name = dotted.strip().removeprefix("job.")
    if not equals:
        raise PlanError(f"--set {override} sets nothing: write it as name=value, for example --set plan.batch.size=64.")
    parts = config.annotations_of(Plan)
    if name.partition(".")[0] in parts:
        raise PlanError(f"--set {override}: {name} belongs to the plan; write --set plan.{name}={text}.")
    if name not in fields:
        raise config.unknown_name(Job, name, text, path="job")
    return name, config.parse_value(text, fields[name], path=f"--set {name}", owner=Job, name=name)


def show_dry_run(job: Job, *, plan: CommandPlan) -> int:
    """Print it and return 0; raises PlanError where the plan cannot work on the job's workers."""
    print(f"job    {config.to_python(job)}")
    workers = job.workers
    if job.run_for is not None:
        job = settled_tasks(job)
        workers = job.workers
        print(f"tasks  {tasks_text(workers or 1, job.servers)}; what they compute is the program's own matter")
    elif plan.whole is None:
        print("plan   the script's own" + (f", with {plan.settings_text}" if plan.settings else ""))
        if workers is None:
            workers = workers_of_script(Path(job.program), plan.settings, args=job.args, say=print)
    else:
        workers = workers or plan.whole.layout.workers or 1
        plan.whole.require(workers=workers)
        resolved = plan.whole.resolve(workers)
        print(f"plan   {resolved}")
        print(f"       {resolved!r}")
    for line in _start_text(job, workers):
        print(f"start  {line}")
    return 0


def _start_text(job: Job, workers: int | None) -> list[str]:
    lines = [" ".join([job.program, *job.args])]
    if workers is None:
        lines.append("as many workers as the script asks for, or one on each host")
    elif job.hosts == 1:
        first = " (worker 0 in this process)" if job.launcher == "inline" else ""
        plural = "s" if workers > 1 else ""
        if job.run_for is not None:
            lines.append(f"{workers} process{'es' * (workers > 1)} on this host, each a new Python with the script")
        else:
            lines.append(
                f"{workers} worker{plural} on this host, forked from one process that has imported torch{first}"
            )
    else:
        least, extra = divmod(workers, job.hosts)
        shares = f"{least}" if not extra else f"{least} or {least + 1}"
        noun = "workers" if job.run_for is None else "processes"
        lines.append(f"{workers} {noun} on {job.hosts} hosts that meet at {job.head}, {shares} on each")
    lines.append(
        f"run directory {job.run_dir or 'runs/<program>-<date>-<time>'}{', from the beginning' if job.fresh else ''}"
    )
    return lines
