"""When workers are lost and their states outlive them: all begin again, as the next attempt of the run, at once.

The supervisor stays, and with it the warm parent and the vaults. It ends the workers that are left, looks for the
newest state that all places have in memory, or a newer one on the disk, and forks all workers again. With several hosts
each has such a supervisor; the head decides, and they meet again. A loss that comes back each time is not survived for
ever: after `MAX_RESTARTS_WITHOUT_PROGRESS` restarts in a row without a step further the run fails as it would have the
first time.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import find
from paceline.events import Restarted
from paceline.launch.coordinator.rendezvous import RetainedHostState
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.io.signals import StopSignals
from paceline.launch.job.outcome import JobOutcome, RecoverableLoss
from paceline.launch.job.restart_plan import (
    RestartPlan,
    newest_step,
    ranks_restored_from_neighbors,
    reassign_ranks,
    snapshot_transfers,
)
from paceline.runs.attempt import Attempt

__all__ = ["RestartBudget", "newest_state_source", "restart_decision", "run_with_restarts"]

MAX_RESTARTS_WITHOUT_PROGRESS = 3  # in a row
WRITTEN_S = 2.0  # what file systems may be behind the clock


def run_with_restarts(attempt: Attempt, warm: WarmParent) -> tuple[Attempt, JobOutcome]:
    """Run an attempt, and its successors where workers are lost; returns the last one, and how it ended.

    Raises what `Attempt.run` raises. `warm` is closed by the caller.
    """
    began, budget, most = time.time() - WRITTEN_S, RestartBudget(), attempt.job.workers or 1
    with contextlib.ExitStack() as stack:
        signals = StopSignals()
        if attempt.job.launcher != "inline":
            stack.enter_context(signals)
        retained = stack.enter_context(contextlib.closing(RetainedHostState(signals=signals)))

        def judge(attempt: Attempt, outcome: JobOutcome, at_step: int) -> RestartPlan | None:
            """How to go on after this outcome; None: not at all."""
            if outcome.recoverable_loss is None:
                return None
            if not budget.allows(at_step):
                attempt.say(
                    f"the workers have begun again {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row, and none came "
                    f"beyond step {at_step}: the run ends"
                )
                return None
            on_disk = _on_disk(attempt, since=began)
            return restart_decision(outcome.recoverable_loss, most=most, on_disk=on_disk, at_step=at_step)

        while True:
            outcome = attempt.run(warm, retained=retained, judge=judge)
            if attempt.next is None:
                return attempt, outcome
            retained.memory_checkpoints.workers_each = attempt.next.workers_each
            retained.memory_checkpoints.keep_only(attempt.next.begins_at)
            attempt = attempt.successor(attempt.next)


class RestartBudget:
    """Counts restarts that brought nothing new."""

    def __init__(self) -> None:
        self._furthest = -1
        self._in_a_row = 0

    def allows(self, at_step: int) -> bool:
        """Whether the workers may begin again after a loss at this step, the newest that was committed."""
        if at_step > self._furthest:
            self._furthest, self._in_a_row = at_step, 0
        self._in_a_row += 1
        return self._in_a_row <= MAX_RESTARTS_WITHOUT_PROGRESS


def newest_state_source(in_memory: int | None, on_disk: int | None) -> tuple[str, int]:
    """Return where the newest state is ("memory", "disk" or "nothing"), and its step."""
    if in_memory is not None and in_memory >= (on_disk or 0):
        return "memory", in_memory
    return ("disk", on_disk) if on_disk else ("nothing", 0)


def restart_decision(recoverable_loss: RecoverableLoss, *, most: int, on_disk: int | None, at_step: int) -> RestartPlan:
    """Return how all begin again on the hosts that are left: from which state, and who is where. `most`: workers with
    which the run began; `on_disk`: the step of the newest checkpoint."""
    each, hosts = recoverable_loss.workers_each, recoverable_loss.hosts
    in_memory = newest_step(
        (one for host in hosts for one in host.snapshots), recoverable_loss.workers, workers_each=each
    )
    source, step = newest_state_source(in_memory, on_disk)
    ranks = reassign_ranks(hosts, recoverable_loss.workers, workers_each=each)
    is_kept = source == "memory"
    restarted = Restarted(
        causes=recoverable_loss.causes,
        lost=recoverable_loss.lost,
        workers=recoverable_loss.workers,
        at_step=at_step,
        step=step,
        source=source,
        lost_at=recoverable_loss.lost_at,
        hosts=len(hosts),
        lent=ranks_restored_from_neighbors(hosts, ranks, step, workers_each=each) if is_kept else (),
    )
    return RestartPlan(
        restarted=restarted,
        ranks=ranks,
        slots={host.index: host.slots for host in hosts},
        most=most,
        transfers=snapshot_transfers(hosts, ranks, step, workers_each=each) if is_kept else (),
        workers_each=each,
        least=recoverable_loss.least,
        keeps=recoverable_loss.keeps,
    )


def _on_disk(attempt: Attempt, *, since: float) -> int | None:
    """The step of the newest checkpoint that the run would go on from; with `fresh` those from before do not count."""
    found = find(Path(attempt.run_dir) / "checkpoints")
    if found.newest is None:
        return None
    is_own = (found.newest / "checkpoint.json").stat().st_mtime >= since
    return found.step if is_own or not attempt.job.fresh else None
