"""`paceline pool`: shares the devices of this machine among runs that `paceline run --pool` has queued."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import clock, config, environment
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.plan import Job
from paceline.units import printable, shell_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.batch import Batch
    from paceline.pool.batch_growth import BatchGrowth

__all__ = ["add", "add_options", "queue"]

POOL_OPTIONS = ("--pool", "--priority", "--deadline-s", "--batch-grows")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "pool",
        summary="share this machine's devices among queued runs, and resize them while they train",
        description="Serve a pool: start the runs that `paceline run --pool POOL` has queued, and give and take "
        "replicas while they train, so that no device is idle and no run waits for long. Ctrl-C has all runs save and "
        "end; they go on when the pool is started again. After kill -9 the runs go on by themselves, and the next "
        "start finds them.",
        examples="  paceline pool pool --slots 8\n"
        '  paceline run --pool pool train.py --plan "replicas=1-4+batch(size=64)"\n'
        "  paceline pool pool --show\n"
        "  paceline pool pool --cancel train-20260101-120000\n\n"
        "exit status: 0 ended in good order; 2 another process serves it, or there is no such run",
    )
    parser.add_argument("pool", metavar="POOL", type=Path, help="the pool's folder; made if needed")
    parser.add_argument(
        "--slots",
        metavar="N",
        help="devices of this host to share: workers that run at the same time (default: one for each GPU, or else for "
        "each core)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--node",
        action="store_true",
        help="give this host's devices to a pool of several hosts; the first of them is the pool",
    )
    what.add_argument("--show", action="store_true", help="print the pool's runs and what was decided last, and exit")
    what.add_argument("--json", action="store_true", help="the same as JSON for programs")
    what.add_argument("--cancel", metavar="NAME", help="stop this run, take it out of the pool, and exit")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Serve the pool, or show it, or take a run out; returns the exit status."""
    from paceline.pool.follow import pool_lines
    from paceline.pool.pool_run import queued_runs
    from paceline.pool.pool_state import PoolRecord

    pool: Path = arguments.pool
    if arguments.cancel is not None:
        return _cancel(pool, arguments.cancel)
    if arguments.show or arguments.json:
        if not pool.is_dir():
            raise PlanError(f"There is no pool {pool}: `paceline pool {pool}` makes one.")
        record = PoolRecord.load(pool)
        if arguments.json:
            print(json.dumps({**dataclasses.asdict(record), "is_alive": record.is_alive(pool)}, indent=1))
        else:
            print(printable("\n".join(pool_lines(pool, record, queued_runs(pool, known={})))))
        return 0
    return _serve(pool, arguments)


def _serve(pool: Path, arguments: argparse.Namespace) -> int:
    """Be the pool, or a node of it."""
    from paceline.pool.devices import own_offer
    from paceline.pool.serve import serve, serve_node

    world = environment.detect()
    if world is not None and world.local_workers > 1:
        raise PlanError(
            f"{world.source} started this command {world.local_workers} times on this host. Have it start one for each "
            "host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, torchrun --nproc-per-node 1)."
        )
    offer = own_offer(None if arguments.slots is None else config.parse_value(arguments.slots, int, path="--slots"))
    devices = f"{offer.slots} {'GPU' if offer.gpus else 'device'}{'' if offer.slots == 1 else 's'}"
    _say(f"offers {devices}: paceline run --pool {pool} SCRIPT")
    if arguments.node or (world is not None and world.workers > 1):
        serve_node(pool, offer, say=_say)
    else:
        serve(pool, offer, say=_say)
    return 0


def _cancel(pool: Path, name: str) -> int:
    from paceline.pool.pool_run import queued_runs
    from paceline.pool.withdrawal import take_out

    runs = queued_runs(pool, known={})
    if name not in runs:
        raise PlanError(f"{pool} has no run named {name!r}. It has: {', '.join(runs) or 'none'}.")
    host, run_dir = take_out(runs[name], pool=pool), runs[name].run_dir
    print(f"{name} is taken out; its files stay in {run_dir}")
    if host:
        there = shell_text("paceline", "stop", run_dir)
        print(f"It still runs: no pool is there to end it, and host {host} leads it. There: {there}")
    return 0


def _say(text: str) -> None:
    print(printable(f"pool {time.strftime('%H:%M:%S')}  {text}"), flush=True)


# The other side: `paceline run --pool`.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `paceline run` that are about a pool."""
    group = parser.add_argument_group("pool")
    group.add_argument("--pool", metavar="POOL", help="queue the run in this pool, and follow it")
    group.add_argument(
        "--priority", metavar="X", help="with --pool: its seconds count so many times those of others (default: 1)"
    )
    group.add_argument("--deadline-s", metavar="SECONDS", help="with --pool: the run should be done after so long")
    group.add_argument(
        "--batch-grows",
        metavar="MOST",
        help="with --pool: the batch may grow with the replicas to so many samples, where that pays by the gradient "
        "noise scale",
    )


def queue(
    arguments: argparse.Namespace, job: Job, *, batch: Batch | None, least: int, most: int, workers_each: int
) -> int:
    """Queue the run that `arguments` ask for, and follow it unless --detach; returns its exit status."""
    from paceline.pool.follow import follow
    from paceline.pool.pool_run import PoolRun
    from paceline.pool.pool_state import PoolRecord
    from paceline.pool.withdrawal import make_way
    from paceline.private_files import make_run_directory
    from paceline.runs.run_directory import new_run_dir

    if job.hosts > 1 or job.launcher != "local" or job.head is not None or job.slots is not None:
        raise PlanError(
            "A pool runs local workers on hosts that it chooses: leave --hosts, --head, --slots and --launcher out."
        )
    pool = Path(arguments.pool)
    deadline_s = _positive(arguments.deadline_s, "--deadline-s")
    growth = _growth(arguments, job, batch=batch, is_elastic=least < most)
    run_dir = Path(job.run_dir) if job.run_dir else new_run_dir(Path(job.program))
    make_run_directory(run_dir)  # now, so that the next one gets another name
    now = clock.now()
    run = PoolRun(
        name=run_dir.resolve().name,
        command=_command_words(arguments.words),
        folder=os.getcwd(),
        environment=environment.child_environment(**{environment.POOL: str(pool.resolve())}),
        run_dir=str(run_dir.absolute()),
        script=job.program,
        least=least,
        most=most,
        workers_each=workers_each,
        submitted=now,
        priority=_positive(arguments.priority, "--priority") or 1.0,
        deadline=None if deadline_s is None else now + deadline_s,
        growth=growth,
    )
    make_way(run, pool=pool)
    run.add_to(pool)
    print(f"paceline: queued in {pool} as {run.name}; its files: {os.path.relpath(run_dir)}", flush=True)
    if not PoolRecord.load(pool).is_alive(pool):
        print(f"paceline: nobody serves {pool} now, so the run waits: paceline pool {pool}", flush=True)
    if arguments.detach:
        return 0
    try:
        return follow(pool, run, say=lambda text: print(f"paceline: {run.name} {text}", flush=True), show=print)
    except KeyboardInterrupt:
        print(f"\npaceline: {run.name} stays in the pool. paceline pool {pool} --cancel {run.name} takes it out.")
        return 130


def _growth(arguments: argparse.Namespace, job: Job, *, batch: Batch | None, is_elastic: bool) -> BatchGrowth | None:
    from paceline.pool.batch_growth import parsed_growth

    if arguments.batch_grows is None:
        return None
    if batch is None:
        raise PlanError('--batch-grows needs the plan on the command line: --plan "replicas=1-4+batch(size=64)".')
    if not is_elastic:
        raise PlanError("--batch-grows goes with elastic replicas: replicas=1-4 in the plan, for example.")
    if job.max_steps is not None:
        raise PlanError("--batch-grows and --max-steps exclude each other: larger steps are fewer. End it by epochs.")
    if not job.noise_scale:
        raise PlanError("--batch-grows needs the gradient noise scale: leave --no-noise-scale out.")
    return parsed_growth(arguments.batch_grows, size=batch.size, micro=batch.resolved_micro)


def _positive(text: str | None, option: str) -> float | None:
    value = None if text is None else config.parse_value(text, float, path=option)
    if value is not None and not 0 < value < math.inf:
        raise PlanError(f"{option} is {value:g}; it must be above 0.")
    return value


def _command_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words after `paceline run`, without what the pool says itself: its options, workers, and the directory."""
    taken, flags = {*POOL_OPTIONS, "--workers", "--run-dir"}, {"--detach"}
    left: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        option, equals, _ = word.partition("=")
        if word == "--":
            return (*left, word, *rest)
        if option in taken:
            if not equals:
                next(rest, None)
        elif word not in flags:
            left.append(word)
    return tuple(left)
