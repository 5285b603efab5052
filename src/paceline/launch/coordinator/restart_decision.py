"""Decides how all workers restart after a loss: when that is safe, on which hosts, or that the job ends instead.

First every process must be gone on all hosts, because the new workers use the same memory. A lost host cannot confirm
that: if its workers could go on by themselves, the coordinator waits until their lease has ended. Each host then
reports the snapshots it has in memory. If the remaining hosts have too little room, a host that joins within the job's
patience replaces the lost one, whose snapshots are in its neighbor's memory.

The module also words the coordinator's messages about hosts, workers and the next start.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from paceline import clock
from paceline.checkpoint.checkpoint_dir import find
from paceline.launch.job.outcome import STUCK, JobOutcome, WorkerExit, verdict
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan, workers_that_fit

__all__ = [
    "GONE_S",
    "WAITS",
    "RestartDecision",
    "RestartRequirement",
    "have_text",
    "leave_text",
    "more_text",
    "next_time",
]

GONE_S = 4.0  # after SIGKILL: workers that are still there then are given up, and there is no restart beside them
WAITS = "for another host (start the same command there), which takes the lost one's place"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartRequirement:
    """How many workers a restart needs."""

    most: int  # the number with which the run began
    workers_each: int | None  # workers of each elastic replica; None: the number of replicas is fixed
    least: int  # fewest elastic replicas

    @property
    def at_least(self) -> int:
        return self.most if self.workers_each is None else min(self.most, self.least * self.workers_each)

    def fit(self, hosts: Sequence[RemainingHost]) -> int:
        """Return how many workers restart on these hosts; 0 if there is too little room."""
        workers = workers_that_fit(hosts, most=self.most, workers_each=self.workers_each)
        return workers if workers >= self.at_least else 0


class RestartDecision:
    """Collects which hosts remain; `outcome` says what follows for the job once that is known."""

    def __init__(
        self,
        needs: RestartRequirement,
        *,
        given_up: JobOutcome | None,
        patience_s: float,
        judge: Callable[[JobOutcome], RestartPlan | None] | None,
        say: Callable[[str], None],
    ) -> None:
        """`given_up` is the outcome of an elastic run that no remaining replica can continue. `judge` may still refuse
        a restart.
        """
        self._needs, self._given_up, self._judge, self._say = needs, given_up, judge, say
        self._patience_s = patience_s
        self.gone_by = time.monotonic() + GONE_S
        self._lost_at = clock.now()
        self._wait_until: float | None = None
        self._has_said_early = False
        self._left: dict[int, RemainingHost] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether every process is gone, and a host that joins is welcome."""
        return self._wait_until is not None

    def has_heard_of(self, host_index: int) -> bool:
        return host_index in self._left

    def hear(self, left: RemainingHost) -> None:
        """A host has ended its workers and reports its snapshots."""
        self._left[left.index] = left

    def keep_only(self, host_indices: Collection[int]) -> None:
        """Forget the snapshots of all hosts but these: the others are lost."""
        self._left = {index: left for index, left in self._left.items() if index in host_indices}

    def is_too_early(self, busy_until: float, now: float) -> bool:
        """Return whether unreachable hosts may still be taking steps of this run, which they may until `busy_until`."""
        if now < busy_until and not self._has_said_early:
            self._has_said_early = True
            self._say(
                f"workers on unreachable hosts may still be taking steps: waiting {busy_until - now:.0f} s, until they "
                "have ended by themselves"
            )
        return now < busy_until

    def outcome(self, exits: Mapping[int, WorkerExit], *, is_clean: bool, now: float) -> JobOutcome | None:
        """Return how the attempt ends, with a `restart_plan` if all restart; None if that cannot be said yet.

        `is_clean`: every process is gone.
        """
        ended = [exits[worker] for worker in sorted(exits)]
        outcome = self._given_up or verdict(ended, keeps_state=True)
        recoverable_loss = outcome.recoverable_loss
        plain = dataclasses.replace(outcome, recoverable_loss=None)
        if recoverable_loss is None or not is_clean or any((one.error or {}).get("kind") == STUCK for one in ended):
            return plain
        hosts = tuple(self._left[index] for index in sorted(self._left))
        workers = self._needs.fit(hosts)
        if not workers:
            return self._waited(hosts, plain, now)
        recoverable_loss = dataclasses.replace(
            recoverable_loss,
            workers=workers,
            workers_each=self._needs.workers_each,
            least=self._needs.least,
            hosts=hosts,
            lost_at=self._lost_at,
        )
        outcome = dataclasses.replace(outcome, recoverable_loss=recoverable_loss)
        if self._judge is None:
            return outcome
        restart_plan = self._judge(outcome)
        if restart_plan is None:  # restarts brought no progress, and another would bring none either
            return plain if self._given_up else dataclasses.replace(plain, exit_code=1, reason="")
        return dataclasses.replace(outcome, restart_plan=restart_plan)

    def _waited(self, hosts: Sequence[RemainingHost], plain: JobOutcome, now: float) -> JobOutcome | None:
        """Too little room: wait for another host for a limited time."""
        slots, needed = sum(host.slots for host in hosts), self._needs.at_least
        if self._wait_until is None:
            self._wait_until = now + self._patience_s
            self._say(
                f"the hosts that are left have room for {slots} of the {needed} workers: waiting up to "
                f"{self._patience_s:.0f} s {WAITS}"
            )
        if now < self._wait_until:
            return None
        self._say(f"no host has joined within {self._patience_s:.0f} s in place of the lost one: the run ends")
        return plain


def next_time(run_dir: Path) -> str:
    """Return from where a run goes on that ended with too few workers, without saving."""
    step = find(run_dir / "checkpoints").step
    if step:
        return f"it can go on from the newest checkpoint, of step {step}"
    return "nothing was saved, so it begins at step 1 again"


def more_text(replicas: int) -> str:
    """Return "2 more replicas"."""
    return f"{replicas} more replica{'s' if replicas > 1 else ''}"


def leave_text(workers: Sequence[int]) -> str:
    """Return "workers 1, 2 leave between two steps, ", the beginning of a sentence; "" where there are none."""
    if not workers:
        return ""
    subject = f"worker {workers[0]} leaves" if len(workers) == 1 else f"workers {', '.join(map(str, workers))} leave"
    return f"{subject} between two steps, "


def have_text(workers: Collection[int]) -> str:
    """Return "workers 1, 2 have", or "worker 1 has"."""
    names = ", ".join(map(str, sorted(workers)))
    return f"worker {names} has" if len(workers) == 1 else f"workers {names} have"
