"""The coordinator, as the rendezvous host of torchrun: it serves the key-value store, and decides for the whole job.

It runs on the job's first host. A job has finished when all workers ended well. After a failure the other workers get a
moment to report what they know of it; then all are ended (`paceline.launch.coordinator.job_end`). If workers are lost
but their state survives in memory, all workers are ended at once and restarted (`paceline.launch.coordinator.restart`).

In an elastic run, losing workers or a host is no failure: the elastic controller lets the remaining replicas go on and
admits hosts that come later. Workers declare that the run is elastic, because the plan may be in the script. If no
replica with the run's state is left, all workers restart.

SIGTERM makes all workers save and leave, once they are taking steps. In an elastic run only the workers of that host
leave, provided that enough replicas remain; where it is this host, another one then takes over as the coordinator
(`paceline.launch.coordinator.handover`).

No restart begins while an unreachable host may still be taking steps of this run.

`paceline.launch.coordinator.remote_hosts` carries messages to workers and other hosts.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.elastic.lease import UnreachableHosts, lease_s, lost_s
from paceline.elastic.membership import Limits
from paceline.elastic.membership_messages import FROM_WORKERS, TOO_FEW
from paceline.events import Event
from paceline.launch.coordinator.elastic_controller import ElasticController
from paceline.launch.coordinator.elastic_worker_actions import ElasticWorkerActions
from paceline.launch.coordinator.handover import OwnDeparture
from paceline.launch.coordinator.job_end import FAILURE_REPORTS_S, TERMINATE_S, JobEnd
from paceline.launch.coordinator.leadership import Leadership
from paceline.launch.coordinator.remote_hosts import COORDINATOR_INDEX, RemoteHost, RemoteHosts
from paceline.launch.coordinator.restart import Admission, JobRestart
from paceline.launch.coordinator.restart_decision import leave_text, more_text
from paceline.launch.coordinator.takeover import HostReport, Takeover
from paceline.launch.coordinator.user_commands import UserCommands
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.signals import signal_text
from paceline.launch.job.outcome import JobOutcome, WorkerExit, WorkerExits, is_root_loss, lost_worker
from paceline.launch.job.placement import ranks_by_host
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan
from paceline.launch.snapshots.snapshot_replication import HostAddress, SnapshotReplication
from paceline.plan.job import Job

__all__ = ["Coordinator"]


class Coordinator:
    """Serves the key-value store, collects how workers end, and decides what follows for the job."""

    def __init__(
        self,
        *,
        host: str,
        address: str,
        job: Job,
        remote_hosts: list[RemoteHost],
        admission: Admission | None,
        attempt: int,
        run_dir: str,
        say: Callable[[str], None],
        snapshot_addresses: Mapping[int, HostAddress] | None = None,
        restart_plan: RestartPlan | None = None,
        takeover: Takeover | None = None,
        reports: Mapping[int, HostReport] | None = None,
        head: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`restart_plan` is set when workers of the previous attempt were lost: it says how all restart.
        `snapshot_addresses` says where other hosts serve the snapshots that this host's workers start from.
        `takeover`: the coordinator was lost, and this one goes on with the hosts that have returned, which have sent
        `reports` (by host index). `head`: HOST:PORT where other hosts find it. `ranks`: those of the workers that
        start on this host (an even share).
        """
        self.host, self.address, self.host_index = host, address, COORDINATOR_INDEX
        self.attempt, self.run_dir, self.head = attempt, run_dir, head
        # The ranks that start on this host; `slots` is how many workers it has room for.
        self.ranks: Sequence[int] = (
            (ranks_by_host(job.workers or 0, [None] * job.hosts)[COORDINATOR_INDEX] if ranks is None else ranks)
            if restart_plan is None and takeover is None
            else ()
            if restart_plan is None
            else restart_plan.ranks[COORDINATOR_INDEX]
        )
        self.slots = len(self.ranks) if restart_plan is None else restart_plan.slots[COORDINATOR_INDEX]
        if takeover is not None:
            self.slots = takeover.slots
        self.snapshot_addresses = dict(snapshot_addresses or {})
        self.replication: SnapshotReplication | None = None  # exchanges in-memory snapshots with other hosts
        lease = lease_s(job.silence_s, job.grace_s)
        self.remote_hosts = RemoteHosts(
            remote_hosts, own=self.ranks, slots=self.slots, host=self, name=host, lease_s=lease
        )
        self._job, self._admission, self._say = job, admission, say
        self._controller: ElasticController | None = None
        self._takeover, self._reports = takeover, dict(reports or {})
        self._has_resumed = False
        # Some worker is taking steps, or will from state that only memory has.
        self._has_begun = (restart_plan is not None and restart_plan.begins_at is not None) or any(
            report.has_begun for report in self._reports.values()
        )
        self._local_workers: LocalWorkers | None = None
        self._cannot_fork = False  # the warm parent is lost, so no worker can be forked
        self._emit: Callable[[Event], None] = lambda _: None
        initial = [*self.ranks, *(worker for remote_host in remote_hosts for worker in remote_host.workers)]
        self._unreachable = (
            UnreachableHosts(self.remote_hosts.hosts_of(initial))
            if takeover is None
            else UnreachableHosts.from_json(takeover.before.state["reach"])
        )
        self._exits = WorkerExits(range(job.workers or 0) if takeover is None else takeover.awaited(self._reports))
        self._end = JobEnd(
            self._exits,
            self.remote_hosts,
            grace_s=job.grace_s,
            timeout_s=job.timeout_s,
            say=say,
            saves=job.run_for is None and job.run_as != "horovod",
        )
        self._restart = JobRestart(
            job,
            self._end,
            self.remote_hosts,
            unreachable=self._unreachable,
            admission=admission,
            run_dir=run_dir,
            ranks=self.ranks,
            slots=self.slots,
            say=say,
            restart_plan=restart_plan,
        )
        self._restart.is_possible |= any(report.keeps for report in self._reports.values())
        self._kv_store = KeyValueStore()
        self.leadership = Leadership(
            self.remote_hosts,
            attempt=attempt,
            host=host,
            state=self._state,
            store=self._store,
            superseded=self._superseded,
            say=say,
        )
        self._departure = OwnDeparture(
            self.remote_hosts, self.leadership, self._end, host=host, grace_s=job.grace_s, say=say
        )
        self._commands = UserCommands(job, self.remote_hosts, self._end, stop=self._stop_by_command)
        self._worker_actions = ElasticWorkerActions(
            self._exits,
            self.remote_hosts,
            unreachable=self._unreachable,
            restart=self._restart,
            publish=self.leadership.publish,
        )

    @property
    def outcome(self) -> JobOutcome | None:
        """The job's outcome, once it has ended."""
        return self._end.outcome

    def decide_restarts(self, judge: Callable[[JobOutcome], RestartPlan | None] | None) -> None:
        """Let `judge` decide whether and how all workers restart after a loss; without it nothing refuses a restart."""
        self._restart.judge = judge

    @property
    def here(self) -> Collection[int]:
        """Ranks whose files are on this host; updated as workers come and go."""
        return self.remote_hosts.here

    def lead(self, local_workers: LocalWorkers, emit: Callable[[Event], None]) -> None:
        """Take over this host's local workers; `emit` writes events to the run's record."""
        self._emit, self._local_workers = emit, local_workers
        self.remote_hosts.lead(local_workers)
        self._end.lead(local_workers, emit)
        self._restart.lead(local_workers)
        self._departure.lead(local_workers)
        self._assign_neighbors()
        if self._takeover is not None:
            self._resume(self._takeover)

    # The register, and a change of the coordinator.

    def _state(self) -> Mapping[str, Any]:
        """What another coordinator takes over."""
        if self._takeover is not None and not self._has_resumed:
            return self._takeover.before.state
        hosts = [[one.index, one.host, one.address] for one in self.remote_hosts]
        elastic, reach = None, self._unreachable.to_json()
        if self._controller is not None:
            elastic = self._controller.to_json()
            reach = [*reach, sorted(self.remote_hosts.hosts_of(elastic["membership"]["view"]["members"]))]
        expected, left = sorted(self._exits.expected), self._departure.left
        return {"hosts": hosts, "workers": expected, "reach": reach, "elastic": elastic, "left": left}

    def _store(self) -> Mapping[str, str]:
        """What other hosts keep of the key-value store, in an elastic run."""
        return {} if self._controller is None else self._kv_store.to_json()

    def _superseded(self, reason: str) -> None:
        """Another coordinator has taken over: this host was cut off, or stood still. Its workers end at once."""
        if self.outcome is not None:
            return
        self._say(f"{reason}: this host had been given up, and ends")
        if self._local_workers is not None:
            self._local_workers.kill()
        self._end.outcome = JobOutcome(state="stopped", exit_code=TOO_FEW, reason=reason, is_superseded=True)
        self.remote_hosts.close()  # other hosts that followed this one look for the other one

    def _resume(self, takeover: Takeover) -> None:
        """Go on where the lost coordinator was: all of its hosts that are left have returned."""
        self._has_resumed = True
        now, reason, host = time.monotonic(), takeover.reason, takeover.before.host
        gone_by = now + lost_s(self._job.silence_s, self._job.grace_s)
        before = set() if takeover.has_left else {COORDINATOR_INDEX}
        for index in {*before, *takeover.hosts} - self._reports.keys():
            self._unreachable.lost(index, gone_by=gone_by)
        for report in self._reports.values():
            self._kv_store.restore(report.kept)
        reports = {worker: one for report in self._reports.values() for worker, one in report.workers.items()}
        elastic = takeover.before.state["elastic"]
        if elastic is not None:
            self._begin_elastic(elastic, is_taken_over=True)
        if self._controller is not None:
            self._controller.resume(
                reports, host=host, reason=reason, room=self.remote_hosts.room(self._controller.workers_each)
            )
        else:
            for number, worker in enumerate(worker for worker in takeover.workers if worker not in reports):
                self.exited(lost_worker(worker, host=host, pid=0, kind="HostLost", message=reason, echo=number > 0))
        for report in self._reports.values():
            for ended in report.exits:
                self.exited(ended)
            if report.finish is not None and self._controller is not None:
                self._controller.stop(report.finish.exit_code, report.finish.reason)
                self._end.note_finish(self._controller.finish)
        self.leadership.publish()

    # Called by the hang monitor.

    def request_stacks(self, worker: int) -> None:
        """Make a worker write its Python stacks."""
        self.remote_hosts.request_stacks(worker)

    def can_do_without(self, workers: Sequence[int]) -> bool:
        """Return whether the job survives the end of these workers: other replicas can go on, or all can restart."""
        return self._restart.is_possible or self._survives(workers)

    def _survives(self, workers: Sequence[int]) -> bool:
        controller = self._controller
        if controller is None:
            return False
        return bool(self._exits.missing - controller.replicas_of(workers))

    def end_hung(self, workers: Sequence[int], error: Mapping[str, Any], *, goes_on: bool) -> None:
        """End the job because these workers hold up the others for longer than the job waits.

        If the run can go on without them (`goes_on`) and is elastic, only these workers are killed. That is a loss like
        any other, with `error["cause"]` as its reason.
        """
        if self._end.is_ending or self.outcome is not None:
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
        if goes_on and self._restart.is_possible:
            self._exits.note_hung(int(error["worker"]), error)
            self._restart.begin()
            return
        self._restart.is_possible = False  # a restart would hang at the same place
        self._exits.end_job_for_hang(error)
        self._end.terminate(TERMINATE_S)

    # Called by the local workers (LocalWorkersListener), and by other hosts for theirs (RemoteHostsListener).

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        if request.get("op") in FROM_WORKERS:
            self._on_notice(worker, request)
        else:
            self.remote_hosts.send(worker, self._kv_store.handle(request))

    def started(self, worker: int, pid: int) -> None:
        """Nothing to do: `LocalWorkers` knows its own processes."""

    def exited(self, ended: WorkerExit) -> None:
        if self.outcome is not None or not self._exits.is_awaited(ended):
            return
        has_finished = self._controller is not None and self._controller.is_over(ended.worker)
        if (
            self._controller is not None
            and not (self._end.has_failed or has_finished)
            and self._goes_on(self._controller, ended)
        ):
            return
        ended = self._exits.with_cause(ended)
        self.remote_hosts.forget(ended.worker, for_good=False)
        self._exits.note(ended)
        if has_finished and ended.is_loss:
            return  # it had finished its part of the run, so nothing is lost
        if ended.is_out_of_memory and self._restart.micro > 1 and self._controller is None and self._may_restart:
            cause = f"worker {ended.worker} (pid {ended.pid}) ran out of memory, and the kernel killed it"
            self._out_of_memory(ended.worker, cause, micro=-(-self._restart.micro // 2))
        elif self._restart.is_possible and is_root_loss(ended) and not self._end.is_under_way:
            self._restart.begin()
        elif ended.failed and not self._end.has_failed:
            # A worker that lost its peer may fail before the peer's host is known to be lost: wait longer.
            is_echo = bool((ended.error or {}).get("echo")) and bool(tuple(self.remote_hosts))
            wait_s = self._job.silence_s + 1.0 if is_echo and self._restart.is_possible else FAILURE_REPORTS_S
            self._end.end_at = time.monotonic() + wait_s

    def cannot_fork(self) -> None:
        self._cannot_fork, self._restart.is_possible = True, False
        self.remote_hosts.shut_own()

    # Called by the supervisor.

    @property
    def has_begun(self) -> bool:
        """Whether a worker is taking steps, so that there is something to save."""
        return self._has_begun

    def interrupted(self, signum: int) -> None:
        """Handle a signal to this supervisor: the first one asks the workers to save and leave, those of this host
        alone where the run goes on without it."""
        if signum != signal.SIGTERM or not self._leaves_alone(signum):
            self._end_everywhere(signum, f"{signal_text(signum)} came")

    def _end_everywhere(self, signum: int, reason: str) -> None:
        """End the run on all hosts, also where only this one was to leave."""
        if self._departure.is_under_way and not self._end.is_under_way:
            self._end.ask_to_leave(reason, self._controller, by_person=signum == signal.SIGINT)
        else:
            self._end.on_signal(signum, has_begun=self._has_begun, controller=self._controller)

    def _leaves_alone(self, signum: int) -> bool:
        """Make this host leave, after which another one takes over; False where the whole run ends."""
        is_training = self._has_begun and not self._restart.is_under_way
        return self._departure.on_signal(signum, self._controller if is_training else None)

    def abandon(self, reason: str, *, signum: int | None = None, is_accident: bool = False) -> None:
        """Tell the other hosts that this host cannot go on, or was stopped before it had workers."""
        self._end.abandon(self.host, reason, signum, is_accident=is_accident)

    def answer_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a user command on this host (`paceline.launch.coordinator.control_socket`)."""
        return self._commands.answer(request, controller=self._controller, has_begun=self._has_begun)

    def _stop_by_command(self) -> None:
        """End the run, unlike SIGTERM, which may be for this host alone."""
        self._end_everywhere(signal.SIGTERM, "`paceline stop` came")

    def tick(self, now: float) -> None:
        """Make the decisions that are due; signals of the same loop turn have been handled before."""
        self.leadership.tick()
        if self._restart.is_under_way:
            self._departure.forget()  # the run begins again, here too; the end of this host is then a loss
            self._restart.tick(now)
            return
        if self._end.finish_when_all_ended():
            return
        # Hosts before workers: workers that are silent because their host is lost are replaced on another host.
        self.remote_hosts.tick(now, silence_s=self._job.silence_s)
        if self.outcome is not None or self._restart.is_under_way:
            return
        if self._controller is not None and not self._end.is_ending:
            self._controller.tick(now, unheard=self.remote_hosts.unheard)
            self._end.note_finish(self._controller.finish)
        if self._admission is not None:
            self._admission.tick(now)
        does_run_end = self._end.is_under_way or self._exits.by_worker  # then no host is released before the others
        if not does_run_end and self.remote_hosts.release_leavers(now, grace_s=self._job.grace_s, say=self._say):
            self._assign_neighbors()
        if not does_run_end:
            self._departure.tick(now, self._controller)
        self._end.tick(now)

    def close(self) -> None:
        self.remote_hosts.close()
        self.close_admission()

    def close_admission(self, *, keep_listening: bool = False) -> socket.socket | None:
        """Admit no more hosts. With `keep_listening` the listening socket is returned; hosts that come wait there."""
        return None if self._admission is None else self._admission.close(keep_listening=keep_listening)

    # Called when other hosts join, leave or are lost.

    def refusal(self) -> tuple[str, bool] | None:
        """Return why a host cannot join now and whether it may retry later; None if it can join."""
        if self._restart.is_waiting_for_host and self.outcome is None:
            return None
        if self._end.is_under_way or self.outcome is not None:
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
        self.leadership.tell(remote_host)
        if self._restart.is_under_way:
            self._say(f"{remote_host.name} has come")
            remote_host.link.send({"op": "again"})
            return
        self._assign_neighbors()
        self.leadership.publish_soon()
        gained = 0 if self._controller is None else self._controller.grow(remote_host.slots)
        self._say(f"{remote_host.name} has joined: {more_text(gained) if gained else 'its slots are spare'}")

    def remote_host_leaves(self, remote_host: RemoteHost, signum: int, *, at_once: bool) -> None:
        if at_once and self._controller is not None:
            return  # its workers count as lost, and the other replicas go on or save without them
        if at_once or not self._has_begun:
            self._end.stop(signum, by=f" on host {remote_host.host}", to_all_hosts=not self._has_begun)
            return
        reason, controller = f"{signal_text(signum)} came on host {remote_host.host}", self._controller
        # Ctrl-C is a person's, and is meant for the whole run.
        if controller is None or signum == signal.SIGINT or not self._goes_on_without(remote_host, controller, reason):
            self._end.ask_to_leave(reason, controller, by_person=signum == signal.SIGINT)

    def remote_host_lost(
        self, remote_host: RemoteHost, exits: Sequence[WorkerExit], message: str, *, silent_s: float
    ) -> None:
        if self.outcome is not None:
            return
        heard = time.monotonic() - (silent_s if remote_host.has_spoken else 0.0)
        self._unreachable.lost(remote_host.index, gone_by=heard + lost_s(self._job.silence_s, self._job.grace_s))
        self._say(message)
        self._assign_neighbors()
        self.leadership.publish()  # a host that is given up takes nothing over
        controller = self._controller
        if controller is not None and not self._end.is_ending:
            done = [ended for ended in exits if controller.is_over(ended.worker)]
            if self._survived([ended for ended in exits if ended not in done], silent_s=silent_s):
                exits = done
        for ended in exits:
            self.exited(ended)

    def remote_host_ended_workers(self, remote_host: RemoteHost, left: RemainingHost) -> None:
        self._restart.host_has_ended_workers(left)

    def _on_notice(self, worker: int, notice: Mapping[str, Any]) -> None:
        """Handle a notice from a worker."""
        match notice["op"]:
            case "elastic":
                if self._controller is None and not self._end.is_ending:
                    self._begin_elastic(notice)
            case "begun":
                self._has_begun = True
                if self._controller is None:
                    self._end.remind(worker)
            case "keeps":
                self._restart.is_possible = True
            case "unserved":
                self._server_lost(worker, str(notice["cause"]))
            case "micro":
                self._restart.micro = int(notice["samples"])
            case "short":
                self._out_of_memory(worker, str(notice["cause"]), micro=max(1, int(notice["micro"])))
            case "leaving" if not self._has_begun:
                self._end.stop(signal.SIGTERM, by=f" to worker {worker}")
            case "leaving" if self._controller is None:
                self._end.ask_to_leave(f"worker {worker} was asked to leave by SIGTERM", None)
            case _ if self._controller is not None and self._exits.is_expected(worker):
                self._controller.on_notice(worker, notice)
                self._end.note_finish(self._controller.finish)
            case _:
                pass

    def _server_lost(self, worker: int, cause: str) -> None:
        """Restart all workers because a parameter server was lost with state that only it had.

        If nothing can be forked any more, or the run is ending, the workers' own errors report the loss.
        """
        if self._may_restart:
            self._restart.begin_after_server_loss(worker, self.remote_hosts.host_of(worker), cause)

    def _out_of_memory(self, worker: int, cause: str, *, micro: int) -> None:
        """Restart all workers with smaller micro-batches; as above, the worker's own error reports it otherwise."""
        if self._may_restart:
            host = self.remote_hosts.host_of(worker)
            self._restart.begin_after_out_of_memory(worker, host, cause, micro=micro)

    @property
    def _may_restart(self) -> bool:
        is_over = self._end.has_failed or self._end.leave_by is not None or self._restart.is_under_way
        return not (is_over or self._cannot_fork or self._job.launcher == "inline")

    def _begin_elastic(self, elastic: Mapping[str, Any], *, is_taken_over: bool = False) -> None:
        """The plan is elastic: a worker has told so, or a lost coordinator, with the state of its controller."""
        least, workers_each = int(elastic["least"]), int(elastic["workers_each"])
        limits = Limits(
            least=least,
            most=int(elastic["most"]),
            workers_each=workers_each,
            program_s=self._job.timeout_s if elastic.get("joins_in_calls") else None,
            silence_s=self._job.silence_s,
            patience_s=self._job.patience_s,
        )
        self._restart.become_elastic(workers_each=workers_each, least=least)
        self._controller = ElasticController(
            limits, workers=self._job.workers or 1, worker_actions=self._worker_actions, emit=self._emit
        )
        if is_taken_over:
            self._controller.take_over(elastic)
        else:
            self.leadership.publish()
        self._kv_store.on_change = self.leadership.kept
        for remote_host in self.remote_hosts:
            self.leadership.hand_store(remote_host)
        early = self._exits.pop_failures()
        if early:
            self._end.end_at = None
        for ended in early:
            self.exited(ended)

    def _goes_on(self, controller: ElasticController, ended: WorkerExit) -> bool:
        """Report the end of a worker to the elastic controller; return whether the run goes on without it."""
        if ended.failed:
            return self._survived([ended])
        has_left = not controller.is_member(ended.worker) and not ended.has_left
        if has_left:
            self._exits.forget(ended.worker)
            self.remote_hosts.forget(ended.worker, for_good=True)
        controller.ended(ended.worker, host=ended.host, has_saved=ended.has_left)
        return has_left

    def _goes_on_without(self, remote_host: RemoteHost, controller: ElasticController, reason: str) -> bool:
        """Make a host's workers leave between two steps; return whether enough replicas remain or fit elsewhere.

        If not, all workers have been told to save and leave.
        """
        if self._end.is_under_way or controller.finish is not None:
            return False
        self.remote_hosts.shut(remote_host)
        workers = sorted(self.remote_hosts.workers_of(remote_host))
        if not controller.leave(workers, reason, room=self.remote_hosts.room(controller.workers_each)):
            return False
        remote_host.leave_by = time.monotonic() + self._job.grace_s
        self._say(f"{reason} ({remote_host.address}): {leave_text(workers)}the run goes on without this host")
        return True

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
            self._exits.forget(ended.worker)
            self.remote_hosts.forget(ended.worker, for_good=False)
        # A worker lost alone leaves its slot free; one lost with its host or slots needs a slot elsewhere.
        is_alone = bool(exits) and all(self.remote_hosts.has_place(ended.worker) for ended in exits)
        ending = controller.replicas_of([ended.worker for ended in exits])
        room = None if is_alone else self.remote_hosts.room(controller.workers_each, without=ending)
        controller.lost(exits, room=room, silent_s=silent_s)
        return True

    def _assign_neighbors(self) -> None:
        """Tell each host which neighbor host receives copies of its snapshots."""
        if self.replication is not None:
            self.remote_hosts.assign_neighbors(self.address if self.slots else None, self.replication)
