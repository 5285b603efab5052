"""Runs what `paceline drill` was asked for: the job undisturbed, then under each fault, each in a run of its own."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import config
from paceline.cli.drill.report import DrillVerdict, print_report
from paceline.cli.drill.request import DrillRequest
from paceline.cli.drill.undisturbed import undisturbed
from paceline.errors import LaunchError, PlanError
from paceline.parallel.mesh import mesh_of
from paceline.plan import LocalSGD, ParameterServer, Plan
from paceline.plan.guard import LEAST_WINDOW
from paceline.testing import KINDS, Programme, Report, run_with
from paceline.testing.faults import EXCHANGE, why_not

__all__ = ["DrillTerms", "drill_terms", "guard_overrides", "main_drill", "programmes_of", "waits_for_servers"]

TIMEOUT_S = 20.0  # how long others wait for a silent process, where workers are not replaced or servers are cut off
FACTOR = 100.0  # of the spread: what a few steps let expect is not worth more
LEAST_S, TIMES = 60.0, 10.0  # a run may take so long, and so many times as long as the undisturbed one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrillTerms:
    """On what terms a job is drilled: what is set in its plan, what does not apply to it, and why."""

    overrides: tuple[str, ...] = ()  # that let replicas come and go
    is_elastic: bool
    kept: str = ""  # why a fixed number of replicas stays, where that is not what was asked for
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])  # kinds of faults, and why
    last_save: int | None = None  # the last step before the end at which there is a checkpoint; None: there is none

    @property
    def said(self) -> tuple[str, ...]:
        """A line for each thing that is not as for every job."""
        kept = (f"replicas stay as they are: {self.kept}",) if self.kept else ()
        return (*kept, *(f"{kind} does not apply: {why}" for kind, why in self.left_out.items()))


def main_drill(request: DrillRequest) -> int:
    """Run everything, print the table; returns 0 where all promises held, 1 where one did not.

    Raises PlanError where the plan or a fault cannot work, WorkerError where the script fails undisturbed, is not
    deterministic, or does not use its batches.
    """
    with _Folder(request.keep) as folder:
        _say(f"undisturbed, {request.steps} steps, twice; then a few steps with other samples")
        like, undisturbed_s = _undisturbed(request, folder.path)
        terms = drill_terms(request, like.plan, workers=like.workers, steps=max(like.losses))
        planned = programmes_of(request, terms, plan=like.plan, steps=max(like.losses), workers=like.workers)
        for line in terms.said:
            _say(line)
        judged: list[DrillVerdict] = []
        for number, programme in enumerate(planned, start=1):
            _say(f"{number}/{len(planned)}  {programme}")
            # Each fault may cost a start of the command.
            limit_s = request.limit_s or len(programme) * (LEAST_S + TIMES * undisturbed_s)
            guarded = guard_overrides(programme, like.plan, snapshot_every=max(1, request.steps // 16))
            run = functools.partial(_run, request, programme, limit_s=limit_s)
            waits = terms.is_elastic and not waits_for_servers(programme, like.plan)
            path = folder.path / f"run_{number}"
            try:
                report = run(path, overrides=(*terms.overrides, *guarded), is_patient=waits)
                if terms.overrides and not judged and not report.losses:
                    raise PlanError(report.output)
            except PlanError as error:
                if not terms.overrides or judged:
                    raise
                terms = dataclasses.replace(terms, overrides=(), is_elastic=False, kept=_reason(str(error)))
                _say(terms.said[0])
                report = run(path.with_name(f"{path.name}_fixed"), overrides=guarded, is_patient=False)
            row = DrillVerdict(report=report, like=like, broken=tuple(report.broken(like, tolerance=request.tolerance)))
            judged.append(row)
            if row.holds and request.keep is None:
                shutil.rmtree(report.folder)
        holds = all(row.holds for row in judged)
        print_report(judged, like=like, said=terms.said, as_json=request.json)
        if not holds:
            folder.stays()
    return 0 if holds else 1


def drill_terms(request: DrillRequest, plan: Plan, *, workers: int, steps: int) -> DrillTerms:
    """What is set for a drill of a plan, as it ran undisturbed, and what is left out of it."""
    most = workers // plan.layout.workers_each
    stays = plan.layout.is_elastic or request.keep_plan or most == 1
    kept = "" if stays else _refusal(plan, most=most, workers=workers)
    is_changed = not stays and not kept
    last_save = _last_save(request, plan, steps=steps)
    return DrillTerms(
        overrides=(f"plan.layout.replicas=1-{most}",) if is_changed else (),
        is_elastic=plan.layout.is_elastic or is_changed,
        kept=kept,
        left_out=_left_out(plan, workers=workers, steps=steps, last_save=last_save),
        last_save=last_save,
    )


def _refusal(plan: Plan, *, most: int, workers: int) -> str:
    """Why replicas of a plan cannot come and go, by the rules of plans; "" where they can."""
    elastic = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, replicas=(1, most)))
    known = {broken.rule for broken in plan.check(workers=workers)}
    return " ".join(broken.says for broken in elastic.check(workers=workers) if broken.rule not in known)


def _last_save(request: DrillRequest, plan: Plan, *, steps: int) -> int | None:
    """The last step before the end at which there is a checkpoint."""
    sync, every = plan.sync, _save_every(request)
    together = sync.every if isinstance(sync, LocalSGD) and not sync.streams else 1  # others agree for the sake of it
    saves = (-(-due // together) * together for due in range(every, steps, every))
    return max((step for step in saves if step < steps), default=None)


def _left_out(plan: Plan, *, workers: int, steps: int, last_save: int | None) -> dict[str, str]:
    """The kinds of faults that are no faults of such a run, or too much for it, and why."""
    each = plan.layout.workers_each
    why = {kind: why_not(kind, steps=steps, workers=workers, each=each) for kind in KINDS}
    left_out = {kind: f"it {reason}" for kind, reason in why.items() if reason}
    if plan.is_asynchronous:
        left_out["flip"] = "replicas that do not wait for each other have different weights, so none is seen to be odd"
    elif plan.is_local:
        left_out["flip"] = (
            "until they agree, replicas have different weights, so none is seen to be odd; then a flipped bit is in "
            "the mean"
        )
    if last_save is None:
        left_out["full_disk"] = (
            f"no checkpoint comes before the end of a run of {steps} steps, by save_every and the steps after which "
            "replicas agree; use more --steps"
        )
    return left_out


def programmes_of(request: DrillRequest, terms: DrillTerms, *, plan: Plan, steps: int, workers: int) -> list[Programme]:
    """The faults of each run, drawn where none are named; PlanError where one cannot come."""
    each = plan.layout.workers_each
    servers = plan.sync.servers if isinstance(plan.sync, ParameterServer) else 0
    kinds = [kind for kind in KINDS if kind not in terms.left_out]
    size = {"steps": steps, "workers": workers, "each": each}
    drawn: dict[str, Any] = {
        **size,
        "kinds": kinds,
        "last_stage": _last_stage(plan, workers),
        "last_save": terms.last_save,
    }
    if request.faults:
        programme = Programme.parse(request.faults)
    elif request.num_random is not None:
        programme = Programme.random(request.seed, **drawn, num=request.num_random)
    else:
        programme = Programme.of_each_kind(request.seed, **drawn, servers=servers)
    if not len(programme):
        raise PlanError(f"--faults {request.faults!r} names no fault. Write it as kill:worker=1,step=10.")
    programme.require(**size, servers=servers)
    for fault in programme:
        if fault.kind == EXCHANGE:
            raise PlanError(f"{fault} is no fault: the drill itself asks that way whether a script uses its batches.")
        if fault.kind in terms.left_out:
            raise PlanError(f"{fault} does not apply to this plan: {terms.left_out[fault.kind]}.")
    alone = [fault for fault in programme if fault.place == "regroup"]
    if alone and not request.together:
        raise PlanError(f"{alone[0]} comes during the recovery from another loss: name that, too, and use --together.")
    return [programme] if request.together else [Programme.of(fault) for fault in programme]


def _last_stage(plan: Plan, workers: int) -> tuple[int, ...]:
    """The workers of a pipeline's last stage; none where the plan has no stages."""
    if plan.layout.stages == 1:
        return ()
    mesh = mesh_of(plan.layout, workers)
    return tuple(rank for rank in range(workers) if mesh.place(rank)["stages"] == plan.layout.stages - 1)


def waits_for_servers(programme: Programme, plan: Plan) -> bool:
    """Whether someone may wait for a server, or a mirror, that is cut off: only the job's timeout_s ends that."""
    return isinstance(plan.sync, ParameterServer) and any(fault.kind == "cut" for fault in programme)


def guard_overrides(programme: Programme, plan: Plan, *, snapshot_every: int = 1) -> tuple[str, ...]:
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


def _undisturbed(request: DrillRequest, folder: Path) -> tuple[Report, float]:
    """Return the undisturbed run, and how many seconds it took."""
    took_s: list[float] = []

    def run(programme: Programme, path: Path, steps: int) -> Report:
        began = time.monotonic()
        few = dataclasses.replace(request, steps=steps, save_every=_save_every(request))
        report = _run(few, programme, path, overrides=(), limit_s=request.limit_s or float("inf"))
        took_s.append(time.monotonic() - began)
        return report

    like = undisturbed(run, request.script, folder, steps=request.steps, tolerance=request.tolerance)
    return like, took_s[0]


def _run(
    request: DrillRequest,
    programme: Programme,
    folder: Path,
    *,
    overrides: Sequence[str],
    limit_s: float,
    is_patient: bool = True,
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
            save_every=_save_every(request),
            silence_s=request.silence_s,
            tensorboard=False,
            **({"timeout_s": TIMEOUT_S} if not is_patient else {}),
        )
    except LaunchError as error:
        raise PlanError(str(error)) from error


def _save_every(request: DrillRequest) -> int:
    return request.save_every or max(1, request.steps // 8)


def _reason(output: str) -> str:
    """The last line that names an error, or the last one."""
    lines = [line.strip() for line in output.strip().splitlines()]
    return next((line for line in reversed(lines) if re.match(r"\w+Error: ", line)), lines[-1])


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
