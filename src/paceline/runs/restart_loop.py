"""Restarts all workers as the next attempt of the run after a loss that their state in memory survives.

The supervisor stays, and with it the warm parent and the memory checkpoints. It ends the remaining workers, looks for
the newest state that every place has in memory, or a newer one on disk, and forks all workers again. Each host has such
a supervisor; the coordinator decides, and the hosts meet again.

A loss that repeats does not restart for ever. After `MAX_RESTARTS_WITHOUT_PROGRESS` restarts in a row without a new
step, the run fails as it would have the first time.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find
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
PROGRAM_PROGRESS_S = 600.0  # another framework's program, whose steps are not known, has gone on after so long


def run_with_restarts(
    attempt: Attempt, warm: WarmParent | None, *, listener: socket.socket | None = None
) -> tuple[Attempt, JobOutcome]:
    """Run an attempt, and its successors after lost workers; return the last one, and how it ended.

    Raise what `Attempt.run` raises. The caller closes `warm`; a coordinator without workers has none. `listener`: where
    the hosts return to a coordinator that takes over.
    """
    before, budget, most = _marks(Path(attempt.run_dir)), RestartBudget(), attempt.job.workers or 1
    with contextlib.ExitStack() as stack:
        signals = StopSignals()
        if attempt.job.launcher != "inline":
            stack.enter_context(signals)
        retained = stack.enter_context(contextlib.closing(RetainedHostState(signals=signals, listener=listener)))
        if attempt.takeover is not None:
            retained.record = attempt.takeover.record

        def judge(attempt: Attempt, outcome: JobOutcome, at_step: int) -> RestartPlan | None:
            """How to go on after this outcome; None: not at all."""
            if outcome.recoverable_loss is None:
                return None
            is_smaller = outcome.recoverable_loss.micro is not None  # which it can become only so often
            is_program = attempt.job.run_for is not None
            if not (
                is_smaller or budget.allows(at_step, goes_on=is_program and attempt.lasted_s >= PROGRAM_PROGRESS_S)
            ):
                far = f"lasted {PROGRAM_PROGRESS_S / 60:.0f} minutes" if is_program else "came beyond step "
                attempt.say(
                    f"the workers have begun again {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row, and none {far}"
                    f"{'' if is_program else budget.furthest}: the run ends"
                )
                return None
            on_disk = _on_disk(attempt, before=before)
            return restart_decision(
                outcome.recoverable_loss,
                most=most,
                on_disk=on_disk,
                at_step=at_step,
                micro=attempt.micro,
                keeps_own_state=is_program or attempt.job.restart_lost or attempt.job.run_as == "horovod",
            )

        while True:
            outcome = attempt.run(warm, retained=retained, judge=judge)
            if attempt.next is None:
                return attempt, outcome
            retained.memory_checkpoints.workers_each = attempt.next.workers_each
            retained.memory_checkpoints.keep_only(attempt.next.begins_at)
            attempt = attempt.successor(attempt.next)


class RestartBudget:
    """Limits restarts that bring no new step. `furthest`: the newest step that any attempt has committed."""

    def __init__(self) -> None:
        self.furthest = -1
        self._in_a_row = 0

    def allows(self, at_step: int, *, goes_on: bool = False) -> bool:
        """Return whether workers may restart after a loss at this step, the newest that was committed. `goes_on`: the
        attempt has brought the run on, whatever is known of its steps."""
        if at_step > self.furthest or goes_on:
            self.furthest, self._in_a_row = max(at_step, self.furthest), 0
        self._in_a_row += 1
        return self._in_a_row <= MAX_RESTARTS_WITHOUT_PROGRESS


def newest_state_source(in_memory: int | None, on_disk: int | None) -> tuple[str, int]:
    """Return where the newest state is ("memory", "disk" or "nothing"), and its step."""
    if in_memory is not None and in_memory >= (on_disk or 0):
        return "memory", in_memory
    return ("disk", on_disk) if on_disk else ("nothing", 0)


def restart_decision(
    recoverable_loss: RecoverableLoss,
    *,
    most: int,
    on_disk: int | None,
    at_step: int,
    micro: int | None = None,
    keeps_own_state: bool = False,
) -> RestartPlan:
    """Return how all workers restart on the remaining hosts: from which state, and which rank runs where.

    `most` is the number of workers with which the run began; `on_disk` is the step of the newest checkpoint. `micro`:
    the samples of a micro-batch so far, if a restart has made them fewer. `keeps_own_state`: a program with
    a loop of its own goes on from what it has saved itself.
    """
    each, hosts = recoverable_loss.workers_each, recoverable_loss.hosts
    in_memory = newest_step(
        (one for host in hosts for one in host.snapshots), recoverable_loss.workers, workers_each=each
    )
    source, step = ("program", 0) if keeps_own_state else newest_state_source(in_memory, on_disk)
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
        micro=recoverable_loss.micro,
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
        micro=recoverable_loss.micro or micro,
    )


def _marks(run_dir: Path) -> dict[Path, tuple[int, int]]:
    """Return the commit marks of a run's checkpoints, each with what distinguishes it from a later one."""
    found = dict[Path, tuple[int, int]]()
    for path in (run_dir / "checkpoints").glob(f"*/{COMMIT_MARKER}"):
        with contextlib.suppress(OSError):  # it is being deleted
            found[path] = (about := path.stat()).st_ino, about.st_mtime_ns
    return found


def _on_disk(attempt: Attempt, *, before: Mapping[Path, tuple[int, int]]) -> int | None:
    """Return the step of the newest checkpoint from which the run would go on; with `fresh`, those that were there
    `before` do not count.
    """
    run_dir = Path(attempt.run_dir)
    found = find(run_dir / "checkpoints")
    if found.newest is None:
        return None
    mark = found.newest / COMMIT_MARKER
    is_own = mark not in before or before[mark] != _marks(run_dir).get(mark)
    return found.step if is_own or not attempt.job.fresh else None
