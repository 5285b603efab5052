"""The agent of every other host: it forwards its workers' requests and exits, and does what the coordinator says.

It ends its workers on its own in two cases only: its supervisor got a signal, or the coordinator was lost. After losing
the coordinator the workers may first save and leave, which works if all workers of the job are still there. It passes
on to them how long they may go on without the coordinator, and they keep to it (`paceline.elastic.lease`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.elastic.heartbeats import heartbeat_interval_s
from paceline.elastic.lease import END_S, coordinator_silence_s, search_s, seconds_since_boot
from paceline.elastic.membership_messages import FROM_WORKERS, PREEMPTED, TOO_FEW, Finish, WorkerReport
from paceline.events import Event
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister
from paceline.launch.coordinator.head_search import HeadSearch
from paceline.launch.coordinator.job_end import REPORT_S, STOP_S, TERMINATE_S
from paceline.launch.coordinator.remote_hosts import FAREWELL_S, SILENCE_S
from paceline.launch.coordinator.takeover import HostReport
from paceline.launch.fork.local_workers import LocalWorkers
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.outcome import JobOutcome, WorkerExit, interrupted, lost_worker, saved_and_left, verdict
from paceline.launch.job.restart_plan import RemainingHost
from paceline.launch.snapshots.snapshot_replication import HostAddress, SnapshotReplication

__all__ = ["HostAgent"]


class HostAgent:
    """Talks to the coordinator in the messages that `paceline.launch.coordinator.remote_hosts` lists."""

    def __init__(
        self,
        link: MessageStream,
        *,
        coordinator: str,
        host: str,
        address: str,
        host_index: int,
        ranks: Sequence[int],
        slots: int,
        attempt: int,
        run_dir: str,
        silence_s: float,
        say: Callable[[str], None],
        snapshot_addresses: Mapping[int, HostAddress] | None = None,
        token: bytes,
        loop: EventLoop,
        hello: Callable[[str], Mapping[str, Any]],
    ) -> None:
        """After `silence_s` without a message the coordinator gives this host up. `snapshot_addresses` says where other
        hosts serve the snapshots that this host's workers start from. `hello(address)`: how it presented itself to the
        coordinator, and does to another one that takes over.
        """
        self._token, self._loop, self._hello = token, loop, hello
        self.register: HeadRegister | None = None  # who leads the run, if the hosts share its directory
        self.take_over: Callable[[HeadRecord], None] | None = None  # has this host take over from the one in the record
        self.prepare_to_take_over: Callable[[], None] = lambda: None
        self.head: str | None = None  # HOST:PORT of the coordinator, as it has said
        self._run, self._epoch = "", 0  # the coordinator's, in the register
        self._search: HeadSearch | None = None  # for another coordinator
        # What another coordinator will want to know: of workers that are there or have ended as planned, and of others.
        self._reports = {worker: WorkerReport() for worker in ranks}
        self._pids: dict[int, int] = {}
        self._failed: dict[int, WorkerExit] = {}
        self._unanswered: dict[tuple[int, Any], Mapping[str, Any]] = {}  # requests, by worker and id
        self._finish: Finish | None = None
        self._keeps = self._is_elastic = False
        self._kept: dict[str, str] = {}  # a copy of the coordinator's key-value store
        self.host, self.address, self.host_index = host, address, host_index
        self.ranks, self.slots = tuple(ranks), slots  # that start on this host; how many workers it has room for
        self.here = set(ranks)  # ranks whose files are on this host; updated as workers come
        self.attempt, self.run_dir = attempt, run_dir  # the coordinator's: the same on all hosts
        self.outcome: JobOutcome | None = None
        self.replication: SnapshotReplication | None = None  # exchanges in-memory snapshots with other hosts
        self.snapshot_addresses = dict(snapshot_addresses or {})
        self._cannot_fork = False
        self._is_restarting = False  # all workers are ended for a restart
        self._local_workers: LocalWorkers | None = None
        self.on_stack_request: Callable[[int], None] = _unheard  # called with each worker that is asked for its stacks
        self._link, self._coordinator, self._say = link, coordinator, say
        self._early: list[Mapping[str, Any]] = []  # messages that came before the local workers were known
        self._exits: list[WorkerExit] = []
        self._signum: int | None = None  # the signal that stopped this host
        self._cut_short: int | None = None  # a second signal, which killed its workers while they were leaving
        self._coordinator_loss = ""
        self._parting = ""  # why the coordinator's host has left, as it has said
        self._has_begun = False  # some worker here is taking steps
        self._leave_by: float | None = None  # after the coordinator was lost: deadline for workers to save and leave
        self._patience: float | None = None  # deadline for a stopping coordinator to send the outcome
        self._next_ping, self._ping_s = 0.0, heartbeat_interval_s(silence_s)
        self._silence_s, self._job_silence_s = coordinator_silence_s(silence_s), silence_s
        self._loss = ""
        self._until: float | None = None  # workers may go on until this time of `seconds_since_boot`

    @property
    def is_late(self) -> bool:
        """Whether the run was already taking steps when this host joined."""
        return not self.ranks

    @property
    def has_left(self) -> bool:
        """Whether a signal to this host made it leave, alone or with the whole run."""
        return self._signum is not None and self.outcome is not None

    @property
    def has_begun(self) -> bool:
        """Whether a worker of this host is taking steps."""
        return self._has_begun

    def lead(self, local_workers: LocalWorkers, emit: Callable[[Event], None]) -> None:
        """Take over the workers of this host; the coordinator keeps the run's record."""
        self._local_workers = local_workers
        self._link.last_received = time.monotonic()  # the coordinator only answers pings, and none was sent before
        while self._early:
            self.on_message(self._early.pop(0))

    # Called by the hang monitor.

    def send_activity(self, activities: Sequence[Mapping[str, Any]]) -> None:
        """Report to the coordinator what the workers of this host do."""
        self._link.send({"op": "doing", "workers": activities})

    # Called by the local workers (LocalWorkersListener).

    def request(self, worker: int, request: Mapping[str, Any]) -> None:
        self._has_begun = self._has_begun or request.get("op") == "begun"
        self._note(worker, request)
        if self._coordinator_loss and self._local_workers is not None:
            self._answer_alone(self._local_workers, worker, request)
            return
        self._link.send({"op": "said", "worker": worker, "request": request})

    def _note(self, worker: int, request: Mapping[str, Any]) -> None:
        """Keep what another coordinator would want to know."""
        if request.get("op") in FROM_WORKERS:
            self._keeps = self._keeps or request.get("op") == "keeps"
            self._is_elastic = self._is_elastic or request.get("op") == "elastic"
            self._reports.setdefault(worker, WorkerReport()).note(request)
        elif "id" in request:
            self._unanswered[worker, request["id"]] = request

    def _note_exit(self, ended: WorkerExit) -> None:
        report = self._reports.pop(ended.worker, WorkerReport())
        self._unanswered = {key: one for key, one in self._unanswered.items() if key[0] != ended.worker}
        self._pids.pop(ended.worker, None)
        if ended.failed:
            self._failed[ended.worker] = ended
        else:
            report.has_ended, report.has_saved = True, ended.has_left
            self._reports[ended.worker] = report

    def started(self, worker: int, pid: int) -> None:
        self._pids[worker] = pid
        self._link.send({"op": "started", "worker": worker, "pid": pid})
        if self._local_workers is not None and self._until is not None:
            self._local_workers.send(worker, {"op": "until", "until": self._until})

    def exited(self, ended: WorkerExit) -> None:
        self._exits.append(ended)
        self._note_exit(ended)
        if self._coordinator_loss and ended.failed and self._keeps and not self._is_elastic:
            # Not all were there to save and leave: all restart from memory, under another coordinator.
            self._begin_search(self._coordinator_loss)
        self._link.send({"op": "exited", "exit": dataclasses.asdict(ended)})

    def cannot_fork(self) -> None:
        self._cannot_fork = True
        self._link.send({"op": "barren"})

    # Called by the supervisor.

    def interrupted(self, signum: int) -> None:
        """Handle a signal to the supervisor: the coordinator decides which workers save and leave.

        A second signal, or one while workers leave because the coordinator was lost, kills them.
        """
        if self._local_workers is None:
            return
        if self._search is not None:
            is_first, self._signum = self._signum is None, self._signum or signum
            if not is_first or self._is_alone:  # nobody could release this host: its workers save and leave
                self._end_search("a signal came")
            return
        if self._signum is not None or self._coordinator_loss:
            self._signum = self._signum or signum
            if self._local_workers.alive:
                self._cut_short = signum
                self._link.send({"op": "leaving", "signal": signum, "reason": "", "at_once": True})
            self._local_workers.kill()
            return
        self._signum = signum
        self._link.send({"op": "leaving", "signal": signum, "reason": ""})
        if not self._has_begun:  # there is nothing to save, so the coordinator should end the job soon
            self._patience = time.monotonic() + STOP_S + REPORT_S

    @property
    def _is_alone(self) -> bool:
        """Whether no other host is left that could take over, by the register."""
        record = None if self.register is None else self.register.read()
        return record is None or all(int(index) == self.host_index for index, _, _ in record.state["hosts"])

    def abandon(self, reason: str, *, signum: int | None = None, is_accident: bool = False) -> None:
        """Tell the coordinator that this host cannot go on, or was stopped before it had workers."""
        about = {"signal": signum, "reason": f"host {self.host}: {reason}", "is_accident": is_accident}
        self._link.send({"op": "leaving", **about})
        self._link.flush(FAREWELL_S)

    def answer_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Refuse a user command: only the coordinator answers commands."""
        return {"error": f"the coordinator of this run is {self._coordinator}: use the command there"}

    def tick(self, now: float) -> None:
        if self._local_workers is None or self.outcome is not None:
            return
        if self._search is not None:
            search = self._search
            search.tick(now)
            if search.failed:
                self._end_search(search.failed)
            return
        if now >= self._next_ping:
            self._next_ping = now + self._ping_s
            self._link.send({"op": "ping", "asked": seconds_since_boot()})
        # The coordinator prepares the run's record first.
        limit_s = self._silence_s if self._until is not None else max(self._silence_s, SILENCE_S)
        if not self._coordinator_loss and now - self._link.last_received > limit_s:
            self.coordinator_lost(f"it sent nothing for {limit_s:.0f} s")
        if self._is_restarting and self._local_workers.have_all_ended:
            self._is_restarting = False
            slots = 0 if self._cannot_fork else self.slots
            left = RemainingHost(
                index=self.host_index, slots=slots, workers=self.ranks, snapshots=self._local_workers.snapshots
            )
            self._link.send({"op": "gone", "left": left.to_json()})
        if self._patience is not None and now >= self._patience and not self._coordinator_loss:
            self.coordinator_lost("it did not end the job")
        if self._leave_by is not None and now >= self._leave_by:
            self._local_workers.terminate(TERMINATE_S)
        if self._coordinator_loss and not self._local_workers.alive:
            self._finish_alone()

    def close(self) -> None:
        if self._search is not None:
            self._search.close()
        self._link.close()

    # Messages of the coordinator.

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Carry out one message of the coordinator; an invalid one ends the membership."""
        if self._local_workers is None:
            self._early.append(message)
            return
        try:
            self._serve(self._local_workers, message)
        except (KeyError, TypeError, ValueError) as error:
            self.coordinator_lost(f"it sent an invalid message ({type(error).__name__}: {error})")

    def coordinator_lost(self, reason: str) -> None:
        """The coordinator is lost: make the workers save and leave if the whole job can, then end them."""
        if self.outcome is not None or self._coordinator_loss or self._search is not None:
            return
        loss = f"the coordinator {self._coordinator} was lost: {reason}"
        if self._parting:
            loss = f"the coordinator {self._coordinator} has left: {self._parting}"
        if (self._is_elastic or self.is_late) and self._begin_search(loss):
            return
        self._coordinator_loss = loss
        self._link.close()
        self._exits = [ended for ended in self._exits if not _is_old_news(ended)]
        self._say(self._coordinator_loss)
        if self._local_workers is None:
            return
        if not self._has_begun:
            self._local_workers.terminate(TERMINATE_S)
            return
        self._leave_by = time.monotonic() + self._local_workers.grace_s
        for (worker, _), request in list(self._unanswered.items()):
            self._answer_alone(self._local_workers, worker, request)
        finish = Finish(exit_code=PREEMPTED, reason=self._coordinator_loss)
        for worker in self._local_workers.alive:
            self._local_workers.send(worker, finish.to_json())

    # Another coordinator.

    def _begin_search(self, loss: str) -> bool:
        """Look for another coordinator, if the hosts share the run's directory; the workers go on meanwhile.

        With a fixed number of workers they first save and leave, which works if all of them are there.
        """
        record = None if self.register is None else self.register.read()
        if self.register is None or record is None or not self._run or record.run != self._run:
            return False
        has_begun = self._has_begun or self.is_late
        if self._local_workers is None or not has_begun or self._signum is not None or self.take_over is None:
            return False
        self._link.close()
        self._loss, self._coordinator_loss, self._leave_by = loss, "", None
        self._say(f"{loss}. Another host takes its place")
        self._search = HeadSearch(
            self.register,
            run=self._run,
            epoch=self._epoch,
            host_index=self.host_index,
            token=self._token,
            loop=self._loop,
            limit_s=self._search_s(self._local_workers.grace_s),
            hello=self._return,
            found=self._found,
            prepare=self.prepare_to_take_over,
            take_over=self.take_over,
            on_message=self.on_message,
            on_lost=self.coordinator_lost,
        )
        return True

    def _search_s(self, grace_s: float) -> float:
        """For how long the workers can wait for another coordinator, and still save and leave in time."""
        until = 0.0 if self._until is None else self._until - seconds_since_boot() - grace_s - END_S
        return max(search_s(self._job_silence_s), until)

    def _return(self, address: str) -> Mapping[str, Any]:
        """What this host tells the coordinator that has taken over."""
        report = HostReport(
            slots=0 if self._cannot_fork else self.slots,
            workers=self._reports,
            pids=self._pids,
            exits=list(self._failed.values()),
            finish=self._finish,
            keeps=self._keeps,
            has_begun=self._has_begun,
            kept=self._kept,
        )
        return {**self._hello(address), "host_index": self.host_index, "report": report.to_json()}

    def _found(self, link: MessageStream, message: Mapping[str, Any]) -> None:
        """Another coordinator has taken over, and knows of this host's workers."""
        self._search, self._link, self._coordinator = None, link, str(message["head"])
        self._parting = ""
        self.head = str(message["at"])
        self._say(f"the run goes on with the coordinator {self._coordinator}")
        for (worker, _), request in list(self._unanswered.items()):
            link.send({"op": "said", "worker": worker, "request": request})
        if self._signum is not None:  # it came meanwhile
            link.send({"op": "leaving", "signal": self._signum, "reason": ""})

    def _end_search(self, why: str) -> None:
        if self._search is not None:
            self._search.close()
        self._search, self.register = None, None
        self._say(f"no other coordinator: {why}")
        self.coordinator_lost(self._loss.partition(" was lost: ")[2])

    def _answer_alone(self, local_workers: LocalWorkers, worker: int, request: Mapping[str, Any]) -> None:
        """Answer in the coordinator's place: a worker that has lost a peer can neither go on nor save."""
        if "id" in request:
            self._unanswered.pop((worker, request["id"]), None)
            local_workers.send(worker, {"id": request["id"], "closed": self._coordinator_loss})
        elif request.get("op") == "stuck":
            local_workers.terminate(TERMINATE_S)

    def _serve(self, local_workers: LocalWorkers, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ping":
                self._until = float(message["asked"]) + float(message["for_s"])
                for worker in local_workers.alive:
                    local_workers.send(worker, {"op": "until", "until": self._until})
            case "register":
                self._run, self._epoch = str(message["run"]), int(message["epoch"])
                record = None if self.register is None else self.register.read()
                self._link.send({"op": "sees", "register": record is not None and record.run == self._run})
            case "kept":
                self._keep(str(message["key"]), message["value"])
            case "tell":
                self._note_told(int(message["worker"]), message["message"])
                local_workers.send(int(message["worker"]), message["message"])
            case "start":
                self.here.add(int(message["worker"]))
                self._failed.pop(int(message["worker"]), None)
                self._reports[int(message["worker"])] = WorkerReport(is_newcomer=True)
                numbers = {name: int(message[name]) for name in ("workers", "incarnation")}
                local_workers.add(int(message["worker"]), **numbers)
            case "kill_worker":
                local_workers.kill_worker(int(message["worker"]))
            case "stack":
                self.on_stack_request(int(message["worker"]))
                local_workers.request_stacks(int(message["worker"]))
            case "stop":
                local_workers.terminate(float(message["grace_s"]))
            case "kill":
                local_workers.kill()
            case "again":
                self._is_restarting = True
                local_workers.kill()
            case "left":
                self._parting = str(message["reason"])
            case "neighbour":
                if self.replication is not None:
                    at = message["at"]
                    self.replication.replicate_to(
                        None if at is None else (str(at[0]), int(at[1])), str(message["name"])
                    )
            case "drop":
                local_workers.drop_state(int(message["worker"]))
            case "end":
                self.outcome = self._own(JobOutcome.from_json(message["outcome"]))
                if self._signum is not None and self.outcome.exit_code == PREEMPTED:
                    self._say(self.outcome.reason)
            case op:
                raise ValueError(f"unknown message {op!r}")

    def _keep(self, key: str, value: Any) -> None:
        if value is None:
            self._kept.pop(key, None)
        else:
            self._kept[key] = str(value)

    def _note_told(self, worker: int, told: Mapping[str, Any]) -> None:
        self._unanswered.pop((worker, told.get("id")), None)
        if told.get("op") == "finish":
            self._finish = Finish.from_json(told)

    def _own(self, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome for this host: workers killed while leaving saved nothing, even if others did."""
        if self._cut_short is None or outcome.exit_code not in (PREEMPTED, TOO_FEW):
            return outcome
        return interrupted(self._cut_short, self._exits)

    def _finish_alone(self) -> None:
        exits = sorted(self._exits, key=lambda ended: ended.worker)
        if exits and all(ended.has_left for ended in exits):
            finish = Finish(exit_code=PREEMPTED, reason=f"{self._coordinator_loss}; everything is saved")
            self._say(finish.reason)
            self.outcome = saved_and_left(finish, exits)
            return
        if self._signum is not None:
            self.outcome = interrupted(self._signum, exits)
            return
        # Worker 0 stands for the coordinator, on whatever host it ran.
        coordinator = lost_worker(0, host=self._coordinator, pid=0, kind="HostLost", message=self._coordinator_loss)
        self.outcome = dataclasses.replace(
            verdict((coordinator, *exits)), reason=self._coordinator_loss, exits=tuple(exits)
        )


def _unheard(worker: int) -> None:
    """Do nothing: there is no hang monitor."""


def _is_old_news(ended: WorkerExit) -> bool:
    """Return whether the run went on after a worker's end: it was replaced, or its program finished."""
    is_error = ended.failed and ended.exit_code is not None and not (ended.error or {}).get("echo")
    return not ended.has_left and not is_error
