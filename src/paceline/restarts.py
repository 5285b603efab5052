"""When workers are lost and their states outlive them: all begin again, as the next attempt of the run, at once.

The supervisor stays, and with it the warm parent and the vaults. It ends the workers that are left, looks for the
newest state that all places have in memory, or a newer one on the disk, and forks all workers again. With several hosts
each has such a supervisor; the head decides, and they meet again. A loss that comes
back each time is not survived for ever: after `ALLOWED` restarts in a row without a step further the run fails as it
would have the first time.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from paceline.attempt import Attempt
from paceline.checkpoint.folder import find
from paceline.events import Restarted
from paceline.launch.again import Again
from paceline.launch.outcome import Broken, Outcome
from paceline.launch.parent import WarmParent
from paceline.launch.signals import Signals
from paceline.launch.staying import Staying
from paceline.launch.stock import deal_again, errands, lent, newest_step

__all__ = ["Patience", "begin_again", "run_to_its_end", "source_of"]

ALLOWED = 3  # in a row
WRITTEN_S = 2.0  # what file systems may be behind the clock


def run_to_its_end(attempt: Attempt, warm: WarmParent) -> tuple[Attempt, Outcome]:
    """Run an attempt, and its successors where workers are lost; returns the last one, and how it ended.

    Raises what `Attempt.run` raises. `warm` is closed by the caller.
    """
    began, patience, most = time.time() - WRITTEN_S, Patience(), attempt.job.workers or 1
    with contextlib.ExitStack() as stack:
        signals = Signals()
        if attempt.job.launcher != "inline":
            stack.enter_context(signals)
        stays = stack.enter_context(contextlib.closing(Staying(signals=signals)))

        def judge(attempt: Attempt, outcome: Outcome, at_step: int) -> Again | None:
            """How to go on after this outcome; None: not at all."""
            if outcome.broken is None:
                return None
            if not patience.allows(at_step):
                attempt.say(
                    f"the workers have begun again {ALLOWED} times in a row, and none came beyond step {at_step}: the "
                    "run ends"
                )
                return None
            on_disk = _on_disk(attempt, since=began)
            return begin_again(outcome.broken, most=most, on_disk=on_disk, at_step=at_step)

        while True:
            outcome = attempt.run(warm, stays=stays, judge=judge)
            if attempt.next is None:
                return attempt, outcome
            stays.vaults.workers_each = attempt.next.workers_each
            stays.vaults.keep_only(attempt.next.begins_at)
            attempt = attempt.successor(attempt.next)


class Patience:
    """Counts restarts that brought nothing new."""

    def __init__(self) -> None:
        self._furthest = -1
        self._in_a_row = 0

    def allows(self, at_step: int) -> bool:
        """Whether the workers may begin again after a loss at this step, the newest that was committed."""
        if at_step > self._furthest:
            self._furthest, self._in_a_row = at_step, 0
        self._in_a_row += 1
        return self._in_a_row <= ALLOWED


def source_of(in_memory: int | None, on_disk: int | None) -> tuple[str, int]:
    """Return where the newest state is ("memory", "disk" or "nothing"), and its step."""
    if in_memory is not None and in_memory >= (on_disk or 0):
        return "memory", in_memory
    return ("disk", on_disk) if on_disk else ("nothing", 0)


def begin_again(broken: Broken, *, most: int, on_disk: int | None, at_step: int) -> Again:
    """Return how all begin again on the hosts that are left: from which state, and who is where. `most`: workers with
    which the run began; `on_disk`: the step of the newest checkpoint."""
    each, hosts = broken.workers_each, broken.hosts
    in_memory = newest_step((one for host in hosts for one in host.stock), broken.workers, workers_each=each)
    source, step = source_of(in_memory, on_disk)
    ranks = deal_again(hosts, broken.workers, workers_each=each)
    is_kept = source == "memory"
    restarted = Restarted(
        causes=broken.causes,
        lost=broken.lost,
        workers=broken.workers,
        at_step=at_step,
        step=step,
        source=source,
        lost_at=broken.lost_at,
        hosts=len(hosts),
        lent=lent(hosts, ranks, step, workers_each=each) if is_kept else (),
    )
    return Again(
        restarted=restarted,
        ranks=ranks,
        slots={host.index: host.slots for host in hosts},
        most=most,
        errands=errands(hosts, ranks, step, workers_each=each) if is_kept else (),
        workers_each=each,
        least=broken.least,
        keeps=broken.keeps,
    )


def _on_disk(attempt: Attempt, *, since: float) -> int | None:
    """The step of the newest checkpoint that the run would go on from; with `fresh` those from before do not count."""
    found = find(Path(attempt.run_dir) / "checkpoints")
    if found.newest is None:
        return None
    is_own = (found.newest / "checkpoint.json").stat().st_mtime >= since
    return found.step if is_own or not attempt.job.fresh else None
