"""The job without faults: what `paceline drill` compares with, and whether anything can be learned from that.

It runs twice, so that a program which is not deterministic is named, and not the faults. A third run of a few steps
gets other samples in its batches: a program whose losses stay the same trains on something else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.errors import PlanError, WorkerError
from paceline.testing import Programme, Report
from paceline.testing.faults import EXCHANGE

__all__ = ["EXCHANGED_STEPS", "require_batches_used", "require_deterministic", "undisturbed"]

EXCHANGED_STEPS = 4  # the first loss of a model may be the same for all samples (a last layer of zeros, a warm-up)

Run = Callable[[Programme, Path, int], Report]  # a programme, a folder, a number of steps


def undisturbed(run: Run, script: Path, folder: Path, *, steps: int, tolerance: float | None) -> Report:
    """Return the undisturbed run. Raise PlanError where the plan cannot work, and WorkerError where the script fails,
    is not deterministic, or does not use its batches."""
    like = _run(run, script, Programme(), folder / "undisturbed", steps)
    if like.plan.is_asynchronous:  # its losses depend on which worker is fast
        return like
    again = _run(run, script, Programme(), folder / "undisturbed_again", steps)
    require_deterministic(script, like, again, tolerance=tolerance)
    few = min(EXCHANGED_STEPS, steps)
    exchanged = _run(run, script, Programme.parse(f"{EXCHANGE}:worker=0,step=1"), folder / "exchanged", few)
    require_batches_used(script, like, again, exchanged)
    return like


def require_deterministic(script: Path, like: Report, again: Report, *, tolerance: float | None) -> None:
    """Raise WorkerError, with the first step that differs, where two undisturbed runs are not alike."""
    most = like.tolerance if tolerance is None else tolerance
    if like.losses.keys() != again.losses.keys():
        step = min(like.losses.keys() ^ again.losses.keys())
        what = f"step {step} is in one of them only ({len(like.losses)} and {len(again.losses)} steps)"
    else:
        step = like.first_difference(again, tolerance=most)
        if step is None:
            return
        what = f"first at step {step}, where the loss is {like.losses[step]:.8g} and {again.losses[step]:.8g}"
    raise WorkerError(
        f"{script} is not deterministic: two undisturbed runs differ, {what}. So no fault is tried: a difference would "
        "prove nothing. Seed what draws random numbers before the loop (torch.manual_seed), take no number from the "
        "clock or the process, and read no file that a run changes; or allow the difference with --tolerance.",
        worker=0,
    )


def require_batches_used(script: Path, like: Report, again: Report, exchanged: Report) -> None:
    """Raise WorkerError where no loss differs, though the batches had other samples."""
    steps = like.losses.keys() & exchanged.losses.keys()
    noise = like.largest_difference(again)  # of a program that is deterministic but for rounding
    if exchanged.came[0] is None or not steps or like.largest_difference(exchanged, steps=steps) > noise:
        return
    raise WorkerError(
        f"{script} does not use its batches: with other samples in them its losses are the same in steps 1 to "
        f"{max(steps)}. So it trains on something else than worker.batches(...) yields, of which neither the drill nor "
        "`paceline audit` knows anything. Use what the loop yields: step(batch).",
        worker=0,
    )


def _run(run: Run, script: Path, programme: Programme, folder: Path, steps: int) -> Report:
    report = run(programme, folder, steps)
    if report.exit_code == 2:
        raise PlanError(f"{script} cannot run undisturbed:\n{report.output.strip()}")
    if report.exit_code != 0:
        how = "fails undisturbed, so there is nothing to compare" if not programme.faults else "fails on other samples"
        raise WorkerError(f"{script} {how}.\n{report.output.strip()}", worker=0)
    return report
