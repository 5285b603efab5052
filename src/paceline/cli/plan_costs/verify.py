"""`--verify K`: the best plans, run for a few steps on this machine; `--receipt RUN`: a run that was done before."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline import environment
from paceline.cli.plan_costs.subject import Subject
from paceline.errors import PlanError
from paceline.monitor.records.measured_run import measured_run, started_as, work_by_worker
from paceline.plan import Layout, Plan
from paceline.plan.job import NO_CLUSTER
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.receipt import LEAST_STEPS, WARM_UP, Receipt
from paceline.planner.search import PricedPlan, micro_batches
from paceline.planner.step_causes import WorkObserved
from paceline.units import count_text, duration_text

__all__ = ["Verified", "print_receipt", "print_verified", "verified", "verified_plans"]

# Least steps, and least seconds as predicted: in the first ten steps a run also compares digests of all parameters
# (worker.step.forward_writes), and in its first two seconds its processes still start. At most so many steps of each.
SETTLING, SETTLING_S = 10, 2.0
MEASURED, MEASURED_S = 10, 0.5
SIZE_MEASURED, SIZE_MEASURED_S = 6, 0.2  # of each further size of micro-batches
MOST_STEPS = 150
MOST_SIZES = 4
LIMIT_S = 300.0  # of one plan's run
GRACE_S = 45.0  # for its workers to leave


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """A plan that was run: its receipt, or why there is none. `sizes`: receipts of it in other micro-batches."""

    priced: PricedPlan
    receipt: Receipt | None
    problem: str = ""
    sizes: tuple[Receipt, ...] = ()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        return self.sizes if self.receipt is None else (self.receipt, *self.sizes)


def verified(
    subject: Subject, script: Path, args: Sequence[str], one: PricedPlan, others: Sequence[PricedPlan] = ()
) -> Verified:
    """Run one plan, and after it, in the same run, `others` that have the same but for the size of micro-batches."""
    workers = one.case.axes.workers
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        run_dir = Path(folder) / "run"
        parts = _steps_of([one, *others])
        command = [sys.executable, "-m", "paceline", "run", str(script), "--plan", str(_as_it_is(one.plan))]
        command += ["--workers", str(workers), "--max-steps", str(parts[-1][-1]), "--run-dir", str(run_dir)]
        command += ["--cluster", NO_CLUSTER]  # its receipt is made here
        command += ["--save-every-s", "0", "--no-save-at-end", "--no-tensorboard", *(["--", *args] if args else [])]
        problem = _problem_of(command, trial_of([one, *others]) if others else "", steps=parts[-1][-1])
        if problem:
            return Verified(priced=one, receipt=None, problem=problem)
        first, *rest = (measured_run(run_dir, steps=steps).step for steps in parts)
        if first is None:  # the script takes fewer steps: what there is, after the very first
            first = measured_run(run_dir, steps=range(SETTLING + 1, parts[0].stop)).step
    if first is None:
        return Verified(priced=one, receipt=None, problem="it ended after too few steps to be measured")
    runs = [(one, first), *((other, found) for other, found in zip(others, rest, strict=True) if found is not None)]
    largest = max(priced.plan.batch.resolved_micro for priced, _ in runs)  # which takes the most memory of them
    own, *sizes = (
        Receipt.of(
            subject.signature,
            priced,
            found if priced.plan.batch.resolved_micro == largest else dataclasses.replace(found, peak=None),
        )
        for priced, found in runs
    )
    return Verified(priced=one, receipt=own, sizes=tuple(sizes))


def trial_of(plans: Sequence[PricedPlan]) -> str:
    """Return how the run is told which sizes to measure: "8:12,16:6"."""
    ends = [steps[-1] for steps in _steps_of(plans)]
    steps = [end - before for before, end in zip([0, *ends], ends, strict=False)]
    return ",".join(f"{one.plan.batch.resolved_micro}:{n}" for one, n in zip(plans, steps, strict=True))


def _steps_of(plans: Sequence[PricedPlan]) -> list[range]:
    """The numbers of the steps by which each plan of a run is measured; between them others settle."""
    settling = _steps_in(plans[0], SETTLING, SETTLING_S)
    found = [range(settling + 1, settling + 1 + _steps_in(plans[0], MEASURED, MEASURED_S))]
    for one in plans[1:]:
        found.append(range(found[-1].stop, found[-1].stop + _steps_in(one, SIZE_MEASURED, SIZE_MEASURED_S)))
    return found


def _steps_in(one: PricedPlan, least: int, seconds: float) -> int:
    return max(least, min(MOST_STEPS, math.ceil(seconds / one.step.step_s)))


def _other_sizes(subject: Subject, where: NamedCluster) -> list[PricedPlan]:
    """The script's plan in the largest micro-batches that its workers can share, and that may fit; ascending."""
    plan = subject.plan
    sizes = micro_batches(plan.batch, subject.axes.data, least=subject.axes.stages)[-MOST_SIZES:]
    found = (
        subject.price(
            dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, micro=micro)),
            where.cluster,
            workers=subject.workers,
        )
        for micro in sizes
        if micro != plan.batch.resolved_micro
    )
    return [one for one in found if one.fits != "does not fit"]


def _as_it_is(plan: Plan) -> Plan:
    """The plan without what a run may change of it: smaller micro-batches, where memory runs out."""
    return dataclasses.replace(plan, guard=dataclasses.replace(plan.guard, on_out_of_memory="stop"))


def _problem_of(command: Sequence[str], trial: str, *, steps: int) -> str:
    """Run a command to its end, and return why it failed, "" if it did not. It is ended in order after the limit."""
    variables = environment.child_environment(**({environment.MICRO_TRIAL: trial} if trial else {}))
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT_S)
        except BaseException as error:
            process.terminate()
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"took more than {LIMIT_S:g} s for {steps} steps"
    lines = [line for line in errors.splitlines() if line.strip()] or ["it failed"]
    return lines[-1].removeprefix("paceline: ") if process.returncode else ""


def verified_plans(
    subject: Subject,
    where: NamedCluster,
    count: int,
    *,
    script: Path,
    args: Sequence[str],
    tell: Callable[[str], None] = lambda _: None,
) -> list[Verified]:
    """Run the script's plan, and one by one the best of the others, each predicted from all before; returns them in
    this order. `tell` is told of each when it has run.
    """
    with _ended_in_order():
        return _run_plans(subject, where, count, script, args, tell)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Within it SIGTERM ends this process as an exception does: with the run that it has started, and its folder."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _run_plans(
    subject: Subject,
    where: NamedCluster,
    count: int,
    script: Path,
    args: Sequence[str],
    tell: Callable[[str], None],
) -> list[Verified]:
    """First the script's plan, in several sizes of micro-batches; then each next one is the best by what those before
    have shown.
    """
    own = subject.price(subject.plan, where.cluster, workers=subject.workers)
    found = [verified(subject, script, args, own, _other_sizes(subject, where))]
    if not found[0].receipts:  # one of the sizes may be what failed
        found = [verified(subject, script, args, own)]
    next_one: PricedPlan | None = own
    while next_one is not None and len(found) <= count:
        if next_one is not own:
            found.append(verified(subject, script, args, next_one))
        tell(f"{len(found)} of at most {count + 1}: {_progress(found[-1])}")
        subject = dataclasses.replace(subject, receipts=(*subject.receipts, *found[-1].receipts))
        ran = [one.priced.plan for one in found]
        best = subject.best(subject.plan, where.cluster, workers=subject.workers, without=ran)
        next_one = next((one for one in best if one.fits != "does not fit" and not _is_same(one.plan, ran)), None)
    return found


def _progress(one: Verified) -> str:
    took = one.problem if one.receipt is None else f"{duration_text(one.receipt.measured_s)} a step"
    return f"{one.priced.plan}: {took}"


def _is_same(plan: Plan, ran: Sequence[Plan]) -> bool:
    """Whether a plan with the same cuts was run: the micro-batch and recompute of each are the best by prediction."""
    return any(_cuts(plan) == _cuts(one) for one in ran[1:])


def _cuts(plan: Plan) -> Layout:
    return dataclasses.replace(plan.layout, schedule="1f1b", sequence=False)


def print_verified(subject: Subject, where: NamedCluster, count: int, *, script: Path, args: Sequence[str]) -> None:
    """Run the script's plan and the best ones, print what was measured, and keep only the receipts."""
    print(f"\nRunning the script's plan and the best {count}, each for some seconds ...", flush=True)
    found = verified_plans(
        subject, where, count, script=script, args=args, tell=lambda text: print(f"  {text}", flush=True)
    )
    found.sort(key=lambda one: one.receipt.measured_s if one.receipt is not None else float("inf"))
    print(*_verified_lines(found, subject.plan), sep="\n")
    _keep([receipt for one in found for receipt in one.receipts], where)


def print_receipt(subject: Subject, where: NamedCluster, run_dir: Path) -> None:
    """Print a run of the script beside what is predicted for its plan, and keep the receipt beside the cluster's file.

    Raises PlanError for a directory without enough measured steps.
    """
    found = measured_run(run_dir)
    measured = found.step
    if measured is None:
        raise PlanError(
            f"{run_dir} has no metrics.jsonl of at least {WARM_UP + LEAST_STEPS} steps: name the directory of a run of "
            "this script."
        )
    plan, workers = subject.plan, subject.workers
    with contextlib.suppress(PlanError):  # of another version: then the script's own counts
        if (started := started_as(run_dir, found.attempt)) is not None:
            plan, workers = Plan.parse(started.plan).resolve(started.workers), started.workers
    receipt = Receipt.of(subject.signature, subject.price(plan, where.cluster, workers=workers), measured)
    print(f"\nrun      {run_dir}: {plan}, {measured.steps} steps on {workers} workers")
    print(*receipt.table(), sep="\n")
    if blame := receipt.blame(WorkObserved(work_s=work_by_worker(run_dir, found.attempt))):
        print(f"         {blame}")
    _keep([receipt], where)


def _keep(receipts: Sequence[Receipt], where: NamedCluster) -> None:
    if where.receipts is None or not receipts:
        return
    for one in receipts:
        one.append_to(where.receipts)
    print(f"         kept in {where.receipts}: the next predictions for this cluster are corrected by it")


def _verified_lines(found: Sequence[Verified], own: Plan) -> Iterator[str]:
    """The measured ranking, and the receipt of the fastest."""
    yield "\nMeasured on this machine, the fastest first"
    yield "  measured    predicted    samples/s  plan"
    for one in found:
        predicted = duration_text(one.priced.step.step_s)
        mine = "   <- the script's" if one.priced.plan == own else ""
        if one.receipt is None:
            yield f"{'-':>10}   {predicted:>10}   {'-':>10}  {one.priced.plan}: {one.problem}{mine}"
            continue
        rate = count_text(one.priced.plan.batch.size / one.receipt.measured_s)
        yield f"{duration_text(one.receipt.measured_s):>10}   {predicted:>10}   {rate:>10}  {one.priced.plan}{mine}"
    if found and found[0].receipt is not None:
        yield ""
        yield from found[0].receipt.lines()
