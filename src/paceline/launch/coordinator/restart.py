"""Carries out a restart of all workers after a loss: ends them on all hosts, waits until it is safe, then decides.

Workers can restart if their state outlives them: in the hosts' memory, or in checkpoints. The latter is enough after
the loss of a parameter server, and where a step ran out of memory. The rules are in `RestartDecision`; this module
applies them as time passes and hosts report.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from paceline.elastic.lease import UnreachableHosts
from paceline.elastic.membership_messages import TOO_FEW
from paceline.launch.coordinator.job_end import TERMINATE_S, JobEnd
from paceline.launch.coordinator.remote_hosts import COORDINATOR_INDEX, RemoteHosts
from paceline.launch.coordinator.restart_decision import RestartDecision, RestartRequirement, next_time
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.job.outcome import JobOutcome, RecoverableLoss, lost_worker
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan
from paceline.plan.job import Job

__all__ = ["Admission", "JobRestart"]


class Admission(Protocol):
    """The listening socket at which other hosts joined; later hosts are admitted or refused here."""

    def tick(self, now: float) -> None: ...

    def close(self, *, keep_listening: bool = False) -> socket.socket | None: ...


class JobRestart:
    """Restarts all workers of a job, or ends the job if that is impossible."""

    def __init__(
        self,
        job: Job,
        job_end: JobEnd,
        remote_hosts: RemoteHosts,
        *,
        unreachable: UnreachableHosts,
        admission: Admission | None,
        run_dir: str,
        ranks: Sequence[int],
        slots: int,
        say: Callable[[str], None],
        restart_plan: RestartPlan | None,
    ) -> None:
        """`ranks` and `slots` are those of the coordinator's host. `restart_plan` is that of the previous restart."""
        self.judge: Callable[[JobOutcome], RestartPlan | None] | None = None  # may still refuse a restart
        self.is_possible = restart_plan is not None and restart_plan.keeps  # the workers' state outlives them
        self.micro = 0  # samples of a micro-batch, if a restart may make it smaller; 0: it may not, or is not known
        self._job, self._job_end, self._remote_hosts, self._unreachable = job, job_end, remote_hosts, unreachable
        self._admission, self._run_dir, self._say = admission, run_dir, say
        self._ranks, self._slots = tuple(ranks), slots
        self._local_workers: LocalWorkers | None = None
        self._has_lost_server = False  # a parameter server was lost
        self._requirement = RestartRequirement(
            most=job.workers or 0 if restart_plan is None else restart_plan.most,
            workers_each=None if restart_plan is None else restart_plan.workers_each,
            least=1 if restart_plan is None else restart_plan.least,
        )
        self._decision: RestartDecision | None = None  # set while all workers are ended for a restart

    def lead(self, local_workers: LocalWorkers) -> None:
        """Take over this host's local workers."""
        self._local_workers = local_workers

    def become_elastic(self, *, workers_each: int, least: int) -> None:
        """The run has replicas of `workers_each` workers, at least `least` of them."""
        self._requirement = dataclasses.replace(self._requirement, workers_each=workers_each, least=least)

    @property
    def is_under_way(self) -> bool:
        """Whether all workers have been ended for a restart."""
        return self._decision is not None

    @property
    def _next_time(self) -> str:
        """From where the next start goes on."""
        is_program = self._job.run_for is not None
        return "the program goes on from what it has saved" if is_program else next_time(Path(self._run_dir))

    @property
    def is_waiting_for_host(self) -> bool:
        """Whether every process has ended, and a host that joins is welcome."""
        return self._decision is not None and self._decision.is_waiting

    def begin(self, given_up: JobOutcome | None = None) -> None:
        """End all workers to restart them; `given_up` is the outcome if they cannot."""
        self._decision = RestartDecision(
            self._requirement, given_up=given_up, patience_s=self._job.patience_s, judge=self.judge, say=self._say
        )
        self._job_end.kill_for_restart()

    def begin_after_server_loss(self, worker: int, host: str, cause: str) -> None:
        """A parameter server was lost with state that only it had: restart all from the newest checkpoint."""
        self._has_lost_server = True
        self._begin_from_disk(worker, host, cause, kind="ServerLost", exit_code=TOO_FEW)  # the program broke nothing

    def begin_after_out_of_memory(self, worker: int, host: str, cause: str, *, micro: int) -> None:
        """A worker got no memory for a step: restart all, with `micro` samples in a micro-batch."""
        self._begin_from_disk(worker, host, cause, kind="OutOfMemory", exit_code=1, micro=micro)

    def _begin_from_disk(
        self, worker: int, host: str, cause: str, *, kind: str, exit_code: int, micro: int | None = None
    ) -> None:
        """Restart though no worker is lost, also where no state is in memory. `exit_code`: if that cannot be."""
        message = f"{cause}: {self._next_time}"
        failure = lost_worker(worker, host=host, pid=0, kind=kind, message=message, names_workers=True)
        loss = RecoverableLoss(causes=(cause,), lost=(), keeps=self.is_possible, micro=micro)
        self.is_possible = True  # from checkpoints on disk
        outcome = JobOutcome(state="failed", exit_code=exit_code, failures=(failure,), recoverable_loss=loss)
        self.begin(outcome)  # the failure says it all

    def give_up(self, reason: str, *, causes: Sequence[str], lost: Sequence[int]) -> None:
        """No replica with the run's state is left: restart all workers if possible, else end the job."""
        given_up = JobOutcome(state="stopped", exit_code=TOO_FEW, reason=reason)
        if self._job_end.exits.has_failures:  # a worker's own program failed, and the other losses followed from it
            self._job_end.terminate(TERMINATE_S)
            return
        if self.is_possible and self._job_end.leave_by is None:
            recoverable_loss = RecoverableLoss(causes=tuple(causes), lost=tuple(lost))
            given_up = dataclasses.replace(given_up, recoverable_loss=recoverable_loss)
        elif time.monotonic() >= self._unreachable.busy_until():
            self._say(f"{reason}: {self._next_time}")
            self._job_end.finish(given_up)
            return
        # Without state in memory this only waits until no lost host can still take steps.
        self.begin(given_up)

    def host_has_ended_workers(self, remaining: RemainingHost) -> None:
        """Another host has ended all its workers, so that all can restart."""
        if self._decision is not None:
            self._decision.hear(remaining)

    def tick(self, now: float) -> None:
        """End the attempt once every process has ended on all hosts and no lost host can still take steps."""
        if self._decision is not None:
            self._advance(self._decision, now)

    def _advance(self, decision: RestartDecision, now: float) -> None:
        remote_hosts, exits = self._remote_hosts, self._job_end.exits
        late = [remote_host for remote_host in remote_hosts if not decision.has_heard_of(remote_host.index)]
        have_local_ended = self._local_workers is None or self._local_workers.have_all_ended
        if (late or exits.missing or not have_local_ended) and now < decision.gone_by:
            return
        if not decision.is_waiting:  # while waiting for a host, a late one has only just joined
            for remote_host in late:
                remote_hosts.lose(remote_host, "it was told to end its workers and did not report their ends")
        have_ended = not exits.missing and (self._local_workers is None or self._local_workers.have_all_ended)
        decision.keep_only({COORDINATOR_INDEX, *(remote_host.index for remote_host in remote_hosts)})
        snapshots = () if self._local_workers is None else self._local_workers.snapshots
        decision.hear(
            RemainingHost(index=COORDINATOR_INDEX, slots=self._slots, workers=self._ranks, snapshots=snapshots)
        )
        if exits.stopped is not None:
            self._job_end.finish(exits.stopped)
            return
        outcome: JobOutcome | None = None
        if not decision.is_too_early(self._unreachable.busy_until(anywhere=self._has_lost_server), now):
            outcome = decision.outcome(exits.by_worker, is_clean=have_ended and self.is_possible, now=now)
        if outcome is None:
            remote_hosts.tick(now, silence_s=self._job.silence_s)
            if self._admission is not None:
                self._admission.tick(now)
            return
        if not outcome.may_restart and outcome.exit_code == TOO_FEW and outcome.reason:
            self._say(f"{outcome.reason}: {self._next_time}")
        self._job_end.finish(outcome)
