"""The coordinator: it runs on the job's first host, serves the key-value store, and decides for the whole job.

A job has finished when all workers ended well. After a failure the other workers get a moment to report what they know;
then all are ended. If workers are lost but their state survives in memory, all workers are ended at once and restarted.

In an elastic run, losing workers or a host is no failure: the elastic controller lets the remaining replicas go on and
admits hosts that come later. Workers declare that the run is elastic, because the plan may be in the script. If no
replica with the run's state is left, all workers restart.

SIGTERM makes all workers save and leave, once they are taking steps. On another host only that host's workers leave,
provided that enough replicas remain. No restart begins while an unreachable host may still be taking steps of this run.

`paceline.launch.coordinator.remote_hosts` carries messages to workers and other hosts.
"""

from __future__ import annotations

import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.elastic.lease import UnreachableHosts, lease_s, lost_s
from paceline.elastic.membership import Limits
from paceline.elastic.membership_messages import FROM_WORKERS, PREEMPTED, TOO_FEW, Finish
from paceline.events import Event, Warned
from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.coordinator.remote_hosts import COORDINATOR_INDEX, RemoteHost, RemoteHosts
from paceline.launch.coordinator.restart import (
    RestartDecision,
    RestartRequirement,
    have_text,
    leave_text,
    more_text,
    next_time,
)
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.job.outcome import (
    JobOutcome,
    RecoverableLoss,
    WorkerExit,
    WorkerExits,
    interrupted,
    is_root_loss,
    lost_worker,
)
from paceline.launch.job.placement import ranks_by_host
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan
from paceline.launch.snapshots.snapshot_replication import HostAddress, SnapshotReplication
from paceline.plan.job import Job

__all__ = ["GATHER_S", "REPORT_S", "STOP_S", "TERMINATE_S", "Coordinator", "next_time"]

GATHER_S = 1.0  # after the first failure, other workers may report what they know of it
TERMINATE_S = 3.0  # after a failure, from SIGTERM to SIGKILL
STOP_S = 5.0  # after a signal to the supervisor, from SIGTERM to SIGKILL
REPORT_S = 4.0  # another host gets this long on top to report how its workers ended


class AdmissionListener(Protocol):
    """The listening socket at which other hosts joined; later hosts are admitted or refused here."""

    def tick(self, now: float) -> None: ...

    def close(self, *, keep_listening: bool = False) -> socket.socket | None: ...


class Coordinator:
    """Serves the key-value store, collects how workers end, and decides what follows for the job."""

    def __init__(
        self,
        *,
        host: str,
        address: str,
        job: Job,
        remote_hosts: list[RemoteHost],
        admission: AdmissionListener | None,
        attempt: int,
        run_dir: str,
        say: Callable[[str], None],
        snapshot_addresses: Mapping[int, HostAddress] | None = None,
        restart_plan: RestartPlan | None = None,
    ) -> None:
        """`restart_plan` is set when workers of the previous attempt were lost: it says how all restart.
        `snapshot_addresses` says where other hosts serve the snapshots that this host's workers start from.
        """
        self.host, self.address, self.host_index = host, address, COORDINATOR_INDEX
        self.attempt, self.run_dir = attempt, run_dir
        # The ranks that start on this host; `slots` is how many workers it has room for.
        self.ranks: Sequence[int] = (
            ranks_by_host(job.workers or 0, job.hosts)[COORDINATOR_INDEX]
            if restart_plan is None
            else restart_plan.ranks[COORDINATOR_INDEX]
        )
        self.slots = len(self.ranks) if restart_plan is None else restart_plan.slots[COORDINATOR_INDEX]
        self.judge: Callable[[JobOutcome], RestartPlan | None] | None = (
            None  # decides whether and how all workers restart
        )
        self.snapshot_addresses = dict(snapshot_addresses or {})
        self.replication: SnapshotReplication | None = None  # exchanges in-memory snapshots with other hosts
        lease = lease_s(job.silence_s, job.grace_s)
        self.remote_hosts = RemoteHosts(
            remote_hosts, own=self.ranks, slots=self.slots, host=self, name=host, lease_s=lease
        )
        begin = [*self.ranks, *(worker for remote_host in remote_hosts for worker in remote_host.workers)]
        self._out_of_reach = UnreachableHosts(self.remote_hosts.hosts_of(begin))
        self.outcome: JobOutcome | None = None
        self._local_workers: LocalWorkers | None = None
        self._job, self._admission, self._say = job, admission, say
        self._ends = WorkerExits(range(job.workers or 0))
        self._controller: ElasticController | None = None
        self._emit: Callable[[Event], None] = _nowhere
        self._has_begun = False  # some worker is taking steps
        self._keeps_state = restart_plan is not None and restart_plan.keeps  # in memory that outlives the workers
        self._cannot_fork = False  # the warm parent is gone, so no worker can be forked
        self._has_lost_server = False  # a parameter server was lost
        self._needs = RestartRequirement(
            most=job.workers or 0 if restart_plan is None else restart_plan.most,
            workers_each=None if restart_plan is None else restart_plan.workers_each,
            least=1 if restart_plan is None else restart_plan.least,
        )
        self._kv_store = KeyValueStore()
        self._num_signals = 0  # to this supervisor
        self._leave_by: float | None = None  # deadline for workers that were asked to leave
        self._end_at: float | None = None  # when workers get SIGTERM
        self._ending = False
        self._restart_decision: RestartDecision | None = None  # set while all workers are ended for a restart
        self._lost_at: float | None = None  # deadline for other hosts to report their workers' ends

    @property
    def here(self) -> Collection[int]:
        """Ranks whose files are on this host; updated as workers come and go."""
        return self.remote_hosts.here

    def lead(self, local_workers: LocalWorkers, emit: Callable[[Event], None]) -> None:
        """Take over this host's local workers; `emit` writes events to the run's record."""
        self._local_workers, self._emit = local_workers, emit
        self.remote_hosts.lead(local_workers)
        self._assign_neighbors()

    # Called by the hang monitor.

    def request_stacks(self, worker: int) -> None:
        """Make a worker write its Python stacks."""
        self.remote_hosts.request_stacks(worker)

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Return whether the job survives the end of these workers: other replicas can go on, or all can restart."""
        return self._keeps_state or self._survives(workers)

    def _survives(self, workers: Sequence[int]) -> bool:
        controller = self._controller
        if controller is None:
            return False
        return bool(self._ends.missing - controller.replicas_of(workers))

    def stuck(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        """End the job because these workers hold up the others for longer than the job waits.

        If the run can go on without them (`goes_on`) and is elastic, only these workers are killed. That is a loss like
        any other, with `error["cause"]` as its reason.
        """
        if self._ending or self.outcome is not None:
            return
        if goes_on and self._survives(workers):
            hosts = {worker: self.remote_hosts.host_of(worker) for worker in workers}
            for worker in workers:
                self.remote_hosts.kill(worker)
            self._survived(
                [lost_worker(one, host=hosts[one], pid=0, kind="Hang", message=error["cause"]) for one in workers],
                silent_s=float(error["waited_s"]),
            )
            return
        if goes_on and self._keeps_state:
            self._ends.note_hung(int(error["worker"]), error)
            self._end_for_restart()
            return
        self._keeps_state = False  # a restart would hang at the same place
        self._ends.end_job_for_hang(error)
        self._end_all(TERMINATE_S)

    # Called by the local workers (LocalWorkersListener), and by other hosts for theirs (RemoteHostsListener).

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        if request.get("op") in FROM_WORKERS:
            self._heard(worker, request)
        else:
            self.remote_hosts.send(worker, self._kv_store.handle(request))

    def started(self, worker: int, pid: int) -> None:
        """Nothing to do: `LocalWorkers` knows its own processes."""

    def exited(self, ended: WorkerExit) -> None:
        if self.outcome is not None or not self._ends.is_awaited(ended):
            return
        is_over = self._ending or self._end_at is not None  # a loss after a failure is its consequence
        is_done = self._controller is not None and self._controller.is_over(ended.worker)
        if self._controller is not None and not (is_over or is_done) and self._goes_on(self._controller, ended):
            return
        ended = self._ends.with_cause(ended)
        self.remote_hosts.forget(ended.worker, for_good=False)
        self._ends.note(ended)
        if is_done and ended.is_loss:
            return  # it had finished its part of the run, so nothing is lost
        if self._keeps_state and is_root_loss(ended) and not self._ending and self._leave_by is None:
            self._end_for_restart()
        elif ended.failed and not self._ending and self._end_at is None:
            # A worker that lost its peer may fail before the peer's host is known to be lost: wait longer.
            is_echo = self._keeps_state and bool((ended.error or {}).get("echo")) and bool(tuple(self.remote_hosts))
            self._end_at = time.monotonic() + (self._job.silence_s + 1.0 if is_echo else GATHER_S)

    def cannot_fork(self) -> None:
        self._cannot_fork, self._keeps_state = True, False
        self.remote_hosts.cannot_fork()

    # Called by the supervisor.

    def interrupted(self, signum: int) -> None:
        """Handle a signal to the supervisor: SIGTERM first asks workers to save and leave, others end them; a further
        signal kills them.
        """
        self._num_signals += 1
        if self._num_signals == 1 and signum == signal.SIGTERM and self._has_begun and not self._ending:
            self._ask_to_leave("SIGTERM came")
            return
        if self._num_signals == 1 or not self._ending:
            self._stop(signum)
            return
        self.remote_hosts.broadcast({"op": "kill"})
        if self._local_workers is not None:
            self._local_workers.kill()

    def abandon(self, reason: str, *, signum: int | None = None) -> None:
        """Tell the other hosts that this host cannot go on, or was stopped before it had workers."""
        if signum is not None:
            self._finish(interrupted(signum, (), by=f" on host {self.host}"))
            return
        failure = lost_worker(0, host=self.host, pid=0, kind="LaunchError", message=f"host {self.host}: {reason}")
        self._finish(JobOutcome(state="failed", exit_code=1, failures=(failure,), reason=f"host {self.host}: {reason}"))

    def asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a user command on this host (`paceline.launch.coordinator.control_socket`)."""
        if request.get("op") != "resize" or not isinstance(request.get("replicas"), int):
            return {"error": f"this run does not understand {dict(request)}"}
        if self._controller is None:
            return {
                "error": "the run has a fixed number of replicas (or has not begun): only "
                "Layout(replicas=(least, most)) can be resized while it goes on"
            }
        if self._ending or self._leave_by is not None:
            return {"error": "the run is ending"}
        try:
            self._controller.resize(int(request["replicas"]))
        except ValueError as error:
            return {"error": str(error)}
        return {"says": f"it will have {request['replicas']} replicas"}

    def tick(self, now: float) -> None:
        """Make the decisions that are due; signals of the same loop turn have been handled before."""
        if self._restart_decision is not None:
            self._advance_restart(self._restart_decision, now)
            return
        if not self._ends.missing:
            outcome = self._ends.outcome
            if self._ends.have_all_left:
                self._say(f"{outcome.reason}: everything is saved; run the same command again to go on")
            self._finish(outcome)
            return
        # Hosts before workers: workers that are silent because their host is lost are replaced on another host.
        self.remote_hosts.tick(now, silence_s=self._job.silence_s)
        if self.outcome is not None or self._restart_decision is not None:
            return
        if self._controller is not None and not self._ending:
            self._controller.tick(now, unheard=self.remote_hosts.unheard)
            self._note_finish(self._controller.finish)
        if self._leave_by is not None and now >= self._leave_by and not self._ending:
            late = have_text(self._ends.missing)
            self._emit(Warned(text=f"{late} not left within {self._job.grace_s:.0f} s: they are ended"))
            self._stop(signal.SIGTERM)
        if self._admission is not None:
            self._admission.tick(now)
        for remote_host in self.remote_hosts:
            if remote_host.leave_by is not None:
                self._release_empty_host(remote_host, now)
        if self._lost_at is not None and now >= self._lost_at:
            for remote_host in self.remote_hosts:
                if self.remote_hosts.workers_of(remote_host):
                    self.remote_hosts.lose(remote_host, "it was told to end its workers and did not report their ends")
        if self._end_at is not None and now >= self._end_at and not self._ending:
            self._end_all(TERMINATE_S)

    def close(self) -> None:
        self.remote_hosts.close()
        self.close_admission()

    def close_admission(self, *, keep_listening: bool = False) -> socket.socket | None:
        """Admit no more hosts. With `keep_listening` the listening socket is returned, and hosts that come wait
        there.
        """
        return None if self._admission is None else self._admission.close(keep_listening=keep_listening)

    # Called when other hosts join, leave or are lost.

    def refusal(self) -> tuple[str, bool] | None:
        """Return why a host cannot join now and whether it may retry later; None if it can join."""
        if self._restart_decision is not None and self._restart_decision.is_waiting and self.outcome is None:
            return None
        if self._ending or self._leave_by is not None or self.outcome is not None:
            return "the run is about to end", True
        if self._controller is not None:
            return None
        if self._has_begun:
            return (
                "its plan has a fixed number of replicas: Layout(replicas=(least, most)) lets hosts come later",
                False,
            )
        return "it has not begun yet", True

    def join(self, remote_host: RemoteHost) -> None:
        """Add a host that came while the run goes on."""
        self.remote_hosts.add(remote_host)
        if self._restart_decision is not None:
            self._say(f"{remote_host.name} has come")
            remote_host.link.send({"op": "again"})
            return
        self._assign_neighbors()
        gained = 0 if self._controller is None else self._controller.grow(remote_host.slots)
        self._say(f"{remote_host.name} has joined: {more_text(gained) if gained else 'its slots are spare'}")

    def remote_host_leaves(self, remote_host: RemoteHost, signum: int, *, at_once: bool) -> None:
        if at_once and self._controller is not None:
            return  # its workers count as lost, and the other replicas go on or save without them
        if at_once or signum != signal.SIGTERM or not self._has_begun:
            self._stop(signum, by=f" on host {remote_host.host}")
            return
        reason = f"SIGTERM came on host {remote_host.host}"
        if self._controller is None or not self._goes_on_without(remote_host, self._controller, reason):
            self._ask_to_leave(reason)

    def remote_host_lost(
        self, remote_host: RemoteHost, exits: Sequence[WorkerExit], message: str, *, silent_s: float
    ) -> None:
        if self.outcome is not None:
            return
        heard = time.monotonic() - (silent_s if remote_host.has_spoken else 0.0)
        self._out_of_reach.lost(remote_host.index, gone_by=heard + lost_s(self._job.silence_s, self._job.grace_s))
        self._say(message)
        self._assign_neighbors()
        controller = self._controller
        if controller is not None and not self._ending:
            done = [ended for ended in exits if controller.is_over(ended.worker)]
            if self._survived([ended for ended in exits if ended not in done], silent_s=silent_s):
                exits = done
        for ended in exits:
            self.exited(ended)

    # Called by the elastic controller (WorkerActions).

    def send(self, worker: int, message: Mapping[str, Any]) -> None:
        self.remote_hosts.send(worker, message)

    def start(self, replica: Sequence[int], *, workers: int, incarnation: int) -> None:
        self._ends.expect(replica)
        self.remote_hosts.start(replica, workers=workers, incarnation=incarnation)

    def kill(self, worker: int) -> None:
        """Kill a worker that may not go on; its end is not reported as a failure."""
        self._ends.forget(worker)
        self.remote_hosts.kill(worker)
        self.remote_hosts.forget(worker, for_good=False)

    def host_of(self, worker: int) -> str:
        return self.remote_hosts.host_of(worker)

    def forms(self, members: Collection[int]) -> bool:
        hosts = self.remote_hosts.hosts_of(members)
        self._out_of_reach.told(hosts)
        return len(hosts) > 1

    def formed(self) -> None:
        self._out_of_reach.formed()

    def give_up(self, reason: str, *, causes: Sequence[str], lost: Sequence[int]) -> None:
        given_up = JobOutcome(state="stopped", exit_code=TOO_FEW, reason=reason)
        if self._ends.has_failures:  # a worker's own program failed, and the other losses followed from it
            self._end_all(TERMINATE_S)
            return
        if self._keeps_state and self._leave_by is None:
            given_up = dataclasses.replace(
                given_up, recoverable_loss=RecoverableLoss(causes=tuple(causes), lost=tuple(lost))
            )
        elif time.monotonic() >= self._out_of_reach.busy_until():
            self._say(f"{reason}: {next_time(Path(self.run_dir))}")
            self._finish(given_up)
            return
        # Without state in memory this only waits until no lost host can still take steps.
        self._end_for_restart(given_up)

    def _advance_restart(self, start: RestartDecision, now: float) -> None:
        """End the attempt once every process is gone on all hosts."""
        late = [remote_host for remote_host in self.remote_hosts if not start.has_heard_of(remote_host.index)]
        is_here = bool(self._ends.missing) or (
            self._local_workers is not None and not self._local_workers.have_all_ended
        )
        if (late or is_here) and now < start.gone_by:
            return
        # While waiting for a host, a late one has only just joined.
        for remote_host in late if not start.is_waiting else ():
            self.remote_hosts.lose(remote_host, "it was told to end its workers and did not report their ends")
        is_gone = not self._ends.missing and (self._local_workers is None or self._local_workers.have_all_ended)
        start.keep_only({COORDINATOR_INDEX, *(remote_host.index for remote_host in self.remote_hosts)})
        snapshots = () if self._local_workers is None else self._local_workers.snapshots
        start.hear(
            RemainingHost(index=COORDINATOR_INDEX, slots=self.slots, workers=tuple(self.ranks), snapshots=snapshots)
        )
        if self._ends.stopped is not None:
            self._finish(self._ends.stopped)
            return
        if start.is_too_early(self._out_of_reach.busy_until(anywhere=self._has_lost_server), now):
            self.remote_hosts.tick(now, silence_s=self._job.silence_s)
            if self._admission is not None:
                self._admission.tick(now)
            return
        outcome = start.outcome(self._ends.by_worker, is_clean=is_gone and self._keeps_state, now=now)
        if outcome is None:
            self.remote_hosts.tick(now, silence_s=self._job.silence_s)
            if self._admission is not None:
                self._admission.tick(now)
            return
        if not outcome.may_restart and outcome.exit_code == TOO_FEW:
            self._say(f"{outcome.reason}: {next_time(Path(self.run_dir))}")
        self._finish(outcome)

    def remote_host_gone(self, remote_host: RemoteHost, left: RemainingHost) -> None:
        """A host has ended all its workers, so that all can restart."""
        if self._restart_decision is not None:
            self._restart_decision.hear(left)

    def _heard(self, worker: int, notice: Mapping[str, Any]) -> None:
        """Handle a notice from a worker."""
        match notice["op"]:
            case "elastic":
                if self._controller is None and not self._ending:
                    self._begin_elastic(int(notice["least"]), int(notice["most"]), int(notice["workers_each"]))
            case "begun":
                self._has_begun = True
            case "keeps":
                self._keeps_state = True
            case "unserved":
                self._server_lost(worker, str(notice["cause"]))
            case "leaving" if not self._has_begun:
                self._stop(signal.SIGTERM, by=f" to worker {worker}")
            case "leaving" if self._controller is None:
                self._ask_to_leave(f"worker {worker} was asked to leave by SIGTERM")
            case _ if self._controller is not None and self._ends.is_expected(worker):
                self._controller.heard(worker, notice)
                self._note_finish(self._controller.finish)
            case _:
                pass

    def _server_lost(self, worker: int, cause: str) -> None:
        """A parameter server was lost with state that only it had: restart everything from the newest checkpoint.

        If nothing can be forked any more, or the run is ending, the workers' own errors report the loss.
        """
        is_over = self._ending or self._end_at is not None or self._leave_by is not None
        if is_over or self._cannot_fork or self._job.launcher == "inline":
            return
        message = f"{cause}: {next_time(Path(self.run_dir))}"
        failure = lost_worker(
            worker, host=self.host_of(worker), pid=0, kind="ServerLost", message=message, names_workers=True
        )
        recoverable_loss = RecoverableLoss(causes=(cause,), lost=(), keeps=self._keeps_state)
        self._has_lost_server = True
        self._keeps_state = True  # on disk, in checkpoints
        self._end_for_restart(
            JobOutcome(state="failed", exit_code=1, failures=(failure,), recoverable_loss=recoverable_loss)
        )

    def _begin_elastic(self, least: int, most: int, workers_each: int) -> None:
        limits = Limits(
            least=least,
            most=most,
            workers_each=workers_each,
            silence_s=self._job.silence_s,
            patience_s=self._job.patience_s,
        )
        self._needs = dataclasses.replace(self._needs, workers_each=workers_each, least=least)
        self._controller = ElasticController(
            limits, workers=self._job.workers or 1, worker_actions=self, emit=self._emit
        )
        early = self._ends.pop_failures()
        if early:
            self._end_at = None
        for ended in early:
            self.exited(ended)

    def _goes_on(self, controller: ElasticController, ended: WorkerExit) -> bool:
        """Report the end of a worker to the elastic controller; return whether the run goes on without it."""
        if ended.failed:
            return self._survived([ended])
        has_left = not controller.is_member(ended.worker) and not ended.has_left
        if has_left:
            self._ends.forget(ended.worker)
            self.remote_hosts.forget(ended.worker, for_good=True)
        controller.ended(ended.worker, host=ended.host, has_saved=ended.has_left)
        return has_left

    def _goes_on_without(self, remote_host: RemoteHost, controller: ElasticController, reason: str) -> bool:
        """Make a host's workers leave between two steps; return whether enough replicas remain or fit elsewhere.

        If not, all workers have been told to save and leave.
        """
        if self._ending or self._leave_by is not None or controller.finish is not None:
            return False
        self.remote_hosts.shut(remote_host)
        workers = sorted(self.remote_hosts.workers_of(remote_host))
        if not controller.leave(workers, reason, room=self.remote_hosts.room(controller.workers_each)):
            return False
        remote_host.leave_by = time.monotonic() + self._job.grace_s
        self._say(f"{reason} ({remote_host.address}): {leave_text(workers)}the run goes on without this host")
        return True

    def _release_empty_host(self, remote_host: RemoteHost, now: float) -> None:
        """Release a leaving host once its workers have left; kill workers that exceed the grace time."""
        if self._ending or self._leave_by is not None or self._ends.by_worker:
            return  # the whole run ends, including this host
        workers = self.remote_hosts.workers_of(remote_host)
        if not workers:
            reason = f"host {remote_host.host} was asked to leave, and the run goes on without it"
            gone = JobOutcome(state="stopped", exit_code=PREEMPTED, reason=reason)
            self.remote_hosts.release(remote_host, {"op": "end", "outcome": gone.to_json()})
            self._assign_neighbors()
        elif remote_host.leave_by is not None and now >= remote_host.leave_by:
            remote_host.leave_by = now + self._job.grace_s  # until their ends are reported
            self._say(
                f"the workers on {remote_host.name} have not left within {self._job.grace_s:.0f} s: they are ended"
            )
            remote_host.link.send({"op": "kill"})

    def _survived(self, exits: Sequence[WorkerExit], *, silent_s: float = 0.0) -> bool:
        """Return whether an elastic run goes on without these workers; an error of the user's program is no such loss.

        `silent_s` is for how long nothing had been heard of them.
        """
        controller = self._controller
        if controller is None:
            return False
        if not all(ended.is_loss for ended in exits):
            return False
        for ended in exits:
            self._ends.forget(ended.worker)
            self.remote_hosts.forget(ended.worker, for_good=False)
        # A worker lost alone leaves its slot free; one lost with its host or slots needs a slot elsewhere.
        is_alone = bool(exits) and all(self.remote_hosts.has_place(ended.worker) for ended in exits)
        ending = controller.replicas_of([ended.worker for ended in exits])
        room = None if is_alone else self.remote_hosts.room(controller.workers_each, without=ending)
        controller.lost(exits, room=room, silent_s=silent_s)
        return True

    def _ask_to_leave(self, reason: str) -> None:
        """Make all workers finish the step, save and leave; those that take too long are ended."""
        if self._leave_by is not None or self._ending:
            return
        self._leave_by = time.monotonic() + self._job.grace_s
        self._say(f"{reason}: finishing the step in hand, then saving")
        if self._controller is not None:
            self._controller.stop(PREEMPTED, reason)
            self._note_finish(self._controller.finish)
            return
        finish = Finish(exit_code=PREEMPTED, reason=reason)
        self._note_finish(finish)
        for worker in self._ends.missing:
            self.remote_hosts.send(worker, finish.to_json())

    def _note_finish(self, finish: Finish | None) -> None:
        if finish is not None and self._ends.finish is None:
            self._ends.finish = finish
            self._leave_by = self._leave_by or time.monotonic() + self._job.grace_s

    def _stop(self, signum: int, *, by: str = "") -> None:
        if self._ending:
            if self._restart_decision is not None:
                self._ends.stop(signum, by=by, anyway=True)
            return
        self._ends.stop(signum, by=by)
        self._end_all(STOP_S)

    def _end_for_restart(self, given_up: JobOutcome | None = None) -> None:
        """Kill all workers to restart them: their state is kept, so they need no time to save."""
        self._ending = True
        self._restart_decision = RestartDecision(
            self._needs, given_up=given_up, patience_s=self._job.patience_s, judge=self.judge, say=self._say
        )
        self.remote_hosts.broadcast({"op": "again"})
        if self._local_workers is not None:
            self._local_workers.kill()

    def _assign_neighbors(self) -> None:
        """Tell each host which neighbor host receives copies of its snapshots."""
        if self.replication is not None:
            self.remote_hosts.assign_neighbors(self.address, self.replication)

    def _end_all(self, grace_s: float) -> None:
        self._ending = True
        self._lost_at = time.monotonic() + grace_s + REPORT_S
        self.remote_hosts.broadcast({"op": "stop", "grace_s": grace_s})
        if self._local_workers is not None:
            self._local_workers.terminate(grace_s)

    def _finish(self, outcome: JobOutcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.remote_hosts.farewell({"op": "end", "outcome": outcome.to_json()})


def _nowhere(event: Event) -> None:
    """Drop the event: used until a record exists."""
