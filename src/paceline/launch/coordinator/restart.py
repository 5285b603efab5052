"""All are ended to begin again: what the head waits for until they can, and what it finds.

First every process has to be gone, on all hosts: those that follow use the same memory. Of a host that was lost nobody
can say that: where its workers could go on by themselves, it is waited for that they have ended. Each host then says
what it has. Where a host was lost, the others may have too little room; then a host that comes within the job's
patience takes its place, and what the lost one's workers had is in a neighbour's memory.

What the head says of hosts, workers and the next start, in words.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

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

GONE_S = 4.0  # after SIGKILL: workers that are still there then are given up, and nobody begins again beside them
WAITS = "for another host (start the same command there), which takes the lost one's place"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartRequirement:
    """How many workers begin."""

    most: int  # as many as the run began with
    workers_each: int | None  # of replicas that come and go; None: their number is fixed
    least: int  # of such replicas

    @property
    def at_least(self) -> int:
        return self.most if self.workers_each is None else min(self.most, self.least * self.workers_each)

    def fit(self, hosts: Sequence[RemainingHost]) -> int:
        """How many begin on these hosts; 0 where there is too little room."""
        workers = workers_that_fit(hosts, most=self.most, workers_each=self.workers_each)
        return workers if workers >= self.at_least else 0


class RestartDecision:
    """Told which hosts are left; `outcome` says what follows for the job once that can be said."""

    def __init__(
        self,
        needs: RestartRequirement,
        *,
        given_up: JobOutcome | None,
        patience_s: float,
        judge: Callable[[JobOutcome], RestartPlan | None] | None,
        say: Callable[[str], None],
    ) -> None:
        """`given_up`: an elastic run that nobody who is left could go on with. `judge` may still say no."""
        self._needs, self._given_up, self._judge, self._say = needs, given_up, judge, say
        self._patience_s = patience_s
        self.gone_by = time.monotonic() + GONE_S
        self._lost_at = time.time()
        self._wait_until: float | None = None
        self._has_said_early = False
        self._left: dict[int, RemainingHost] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether everything is gone, and a host that comes is welcome."""
        return self._wait_until is not None

    def has_heard_of(self, host_index: int) -> bool:
        return host_index in self._left

    def hear(self, left: RemainingHost) -> None:
        """A host has ended its workers, and has this."""
        self._left[left.index] = left

    def keep_only(self, host_indices: Collection[int]) -> None:
        """Only these hosts are there: what others had is lost."""
        self._left = {index: left for index, left in self._left.items() if index in host_indices}

    def is_too_early(self, busy_until: float, now: float) -> bool:
        """Whether hosts that were lost have all that it takes to go on, as they may until then."""
        if now < busy_until and not self._has_said_early:
            self._has_said_early = True
            self._say(
                f"all that the run had may still be at work where nothing is heard: waiting {busy_until - now:.0f} s, "
                "until it has ended by itself"
            )
        return now < busy_until

    def outcome(self, exits: Mapping[int, WorkerExit], *, is_clean: bool, now: float) -> JobOutcome | None:
        """How the attempt ends, with `restart_plan` where all begin again; None: not to be said yet. `is_clean`: every
        process is gone."""
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
        if (
            restart_plan is None
        ):  # it came to the same place each time: run by itself again, it would come there for ever
            return plain if self._given_up else dataclasses.replace(plain, exit_code=1, reason="")
        return dataclasses.replace(outcome, restart_plan=restart_plan)

    def _waited(self, hosts: Sequence[RemainingHost], plain: JobOutcome, now: float) -> JobOutcome | None:
        """Too little room: wait for a host, but not for ever."""
        slots, needed = sum(host.slots for host in hosts), self._needs.at_least
        if self._wait_until is None:
            self._wait_until = now + self._patience_s
            self._say(
                f"the hosts that are left have room for {slots} of the {needed} workers: waiting up to "
                f"{self._patience_s:.0f} s {WAITS}"
            )
        if now < self._wait_until:
            return None
        self._say(f"no host has come within {self._patience_s:.0f} s in place of the lost one: the run ends")
        return plain


def next_time(run_dir: Path) -> str:
    """Say what the same command will do where the run has ended with too few workers, and nobody saved."""
    step = find(run_dir / "checkpoints").step
    if step:
        return f"run the same command again to go on from the newest checkpoint, of step {step}"
    return "nothing was saved; run the same command again to begin at step 1"


def more_text(replicas: int) -> str:
    """Return "2 more replicas"."""
    return f"{replicas} more replica{'s' if replicas > 1 else ''}"


def leave_text(workers: Sequence[int]) -> str:
    """Return "workers 1, 2 leave between two steps, ", the beginning of a sentence; "" where there are none."""
    if not workers:
        return ""
    who = f"worker {workers[0]} leaves" if len(workers) == 1 else f"workers {', '.join(map(str, workers))} leave"
    return f"{who} between two steps, "


def have_text(workers: Collection[int]) -> str:
    """Return "workers 1, 2 have", or "worker 1 has"."""
    names = ", ".join(map(str, sorted(workers)))
    return f"worker {names} has" if len(workers) == 1 else f"workers {names} have"
