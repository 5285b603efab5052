"""Runs what `paceline drill` was asked for: the job undisturbed, then under its faults, each in a run of its own."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from paceline import config
from paceline.cli.drill import Request
from paceline.cli.drill_report import Judged, print_report
from paceline.errors import LaunchError, PlanError, WorkerError
from paceline.plan import ParameterServer, Plan
from paceline.plan.guard import LEAST_WINDOW
from paceline.testing import KINDS, Programme, Report, run_with

__all__ = ["main_drill", "programmes"]

TIMEOUT_S = 20.0  # where workers are not replaced: how long the others wait for one that says nothing
FACTOR = 100.0  # of the spread: what a few steps let expect is not worth more
LEAST_S, TIMES = 60.0, 10.0  # a run may take so long, and so many times as long as the undisturbed one


def main_drill(request: Request) -> int:
    """Run everything, print the table; returns 0 where all promises held, 1 where one did not.

    Raises PlanError where the plan or a fault cannot work, WorkerError where the script fails undisturbed.
    """
    with _Folder(request.keep) as folder:
        _say(f"undisturbed, {request.steps} steps")
        began = time.monotonic()
        like = _undisturbed(request, folder.path / "undisturbed")
        undisturbed_s = time.monotonic() - began
        steps, replicas = max(like.losses), (1, like.workers // like.plan.layout.workers_each)
        stays = like.is_elastic or request.keep_plan or replicas == (1, 1)
        given_up = [] if stays else [replicas]
        overrides = tuple(f"plan.layout.replicas={least}-{most}" for least, most in given_up)
        each, kinds = like.plan.layout.workers_each, kinds_for(like.plan)
        servers = like.plan.sync.servers if isinstance(like.plan.sync, ParameterServer) else 0
        planned = programmes(request, steps=steps, workers=like.workers, each=each, kinds=kinds, servers=servers)
        judged: list[Judged] = []
        for number, programme in enumerate(planned, start=1):
            _say(f"{number}/{len(planned)}  {programme}")
            # Each fault may cost a start of the command.
            limit_s = request.limit_s or len(programme) * (LEAST_S + TIMES * undisturbed_s)
            guarded = (*overrides, *guards(programme, like.plan, snapshot_every=max(1, request.steps // 16)))
            report = _run(
                request,
                programme,
                folder.path / f"run_{number}",
                overrides=guarded,
                limit_s=limit_s,
                is_elastic=like.is_elastic or not stays,
            )
            row = Judged(report=report, like=like, broken=tuple(report.broken(like, tolerance=request.tolerance)))
            judged.append(row)
            if row.holds and request.keep is None:
                shutil.rmtree(report.folder)
        holds = all(row.holds for row in judged)
        print_report(judged, like=like, as_json=request.json)
        if not holds:
            folder.stays()
    return 0 if holds else 1


def kinds_for(plan: Plan) -> tuple[str, ...]:
    """What is drilled where no faults are named: where replicas have different weights, none of theirs is flipped."""
    return tuple(kind for kind in KINDS if kind != "flip" or not plan.takes_turns)


def programmes(
    request: Request,
    *,
    steps: int,
    workers: int,
    each: int = 1,
    kinds: Sequence[str] = tuple(KINDS),
    servers: int = 0,
) -> list[Programme]:
    """The faults of each run, or draw some of these `kinds`; PlanError where one cannot come. `each`: workers of a
    replica; `servers`: parameter servers of the plan."""
    if request.faults:
        programme = Programme.parse(request.faults)
    elif request.num_random is not None:
        programme = Programme.random(
            request.seed, steps=steps, workers=workers, kinds=kinds, num=request.num_random, each=each
        )
    else:
        programme = Programme.of_each_kind(
            request.seed, steps=steps, workers=workers, kinds=kinds, each=each, servers=servers
        )
    if not len(programme):
        raise PlanError(f"--faults {request.faults!r} names no fault. Write it as kill:worker=1,step=10.")
    programme.require(steps=steps, workers=workers, each=each, servers=servers)
    alone = [fault for fault in programme if fault.place == "regroup"]
    if alone and not request.together:
        raise PlanError(f"{alone[0]} comes during the recovery from another loss: name that, too, and use --together.")
    return [programme] if request.together else [Programme.of(fault) for fault in programme]


def guards(programme: Programme, plan: Plan, *, snapshot_every: int = 1) -> tuple[str, ...]:
    """What a drill sets in the plan, so that numbers that go wrong are seen, and at once, and that there are snapshots
    in so few steps, where the plan has any."""
    guard = plan.guard
    if plan.keeps_snapshots and guard.snapshot_every is None and any(fault.loses_a_worker for fault in programme):
        guard = dataclasses.replace(guard, snapshot_every=snapshot_every)
    if any(fault.poisons for fault in programme):
        on_spike = guard.on_spike if guard.on_spike == "rollback" else "skip"
        guard = dataclasses.replace(guard, on_spike=on_spike, window=LEAST_WINDOW, factor=FACTOR)
    if any(fault.kind == "flip" for fault in programme):
        guard = dataclasses.replace(guard, check_every=1)
    return () if guard == plan.guard else (f"plan.guard={config.to_short(guard)}",)


def _undisturbed(request: Request, folder: Path) -> Report:
    report = _run(request, Programme(), folder, overrides=(), limit_s=request.limit_s or float("inf"))
    if report.exit_code == 2:
        raise PlanError(f"{request.script} cannot run undisturbed:\n{report.output.strip()}")
    if report.exit_code != 0:
        raise WorkerError(
            f"{request.script} fails undisturbed, so there is nothing to compare.\n{report.output.strip()}", worker=0
        )
    return report


def _run(
    request: Request,
    programme: Programme,
    folder: Path,
    *,
    overrides: Sequence[str],
    limit_s: float,
    is_elastic: bool = True,
) -> Report:
    try:
        return run_with(
            programme,
            request.script,
            folder=folder,
            args=request.args,
            plan=request.plan,
            overrides=(*request.overrides, *overrides),
            limit_s=limit_s,
            workers=request.workers,
            max_steps=request.steps,
            save_every=request.save_every or max(1, request.steps // 8),
            silence_s=request.silence_s,
            tensorboard=False,
            **({"timeout_s": TIMEOUT_S} if not is_elastic else {}),
        )
    except LaunchError as error:
        raise PlanError(str(error)) from error


class _Folder:
    """Where the runs go: a new directory, removed again unless it is to stay."""

    def __init__(self, keep: Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="paceline-drill-")) if keep is None else keep.absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._stays = keep is not None

    def stays(self) -> None:
        """Keep it."""
        self._stays = True
        _say(f"the runs are kept in {self.path}")

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stays:
            shutil.rmtree(self.path)


def _say(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)
