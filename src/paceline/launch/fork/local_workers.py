"""Manages this host's worker processes, as torchrun's local agent does: forks them, reports their ends, ends them.

It also passes messages between workers and the host's role (`paceline.launch.coordinator.coordinator` or
`paceline.launch.coordinator.host_agent`), which makes all decisions about the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline import clock
from paceline.comm.flight_recorder import STACK_SIGNAL
from paceline.errors import LaunchError
from paceline.host_memory import lacks_memory, oom_kills_here
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.outcome import STUCK, WorkerExit, lost_worker, read_error
from paceline.launch.job.placement import worker_dir
from paceline.launch.job.restart_plan import StoredSnapshot
from paceline.launch.snapshots.snapshot_store import SnapshotStore
from paceline.plan.job import ERROR_SPARE, Assignment
from paceline.plan.program_tasks import task_name
from paceline.private_files import make_run_directory

__all__ = ["LocalWorkers", "LocalWorkersListener"]

MAX_PARENT_RESTARTS = 3  # of a warm parent that was lost, in one attempt
MEMORY_REMEDY = "There was not enough memory: free some, or raise the limit (ulimit -v, the container's)"
OOM_LOOK_S = 5.0  # between two looks at how many processes the kernel has killed for want of memory
KILL_TIMEOUT_S = 2.0  # a worker that has not ended this long after SIGKILL counts as stuck


class LocalWorkersListener(Protocol):
    """Receives what local workers report: implemented by `Coordinator` and `HostAgent`."""

    def request(self, worker: int, request: Mapping[str, Any]) -> None: ...

    def started(self, worker: int, pid: int) -> None: ...

    def exited(self, ended: WorkerExit) -> None: ...

    def cannot_fork(self) -> None:
        """This host can fork no more workers."""
        ...


class LocalWorkers:
    """The workers of this host. Every worker is reported as exited exactly once, even if it could not be started.

    `template` is the assignment of workers that start later, without their ranks.
    """

    def __init__(
        self,
        assignments: Sequence[Assignment],
        *,
        template: Assignment,
        parent: WarmParent | None,
        loop: EventLoop,
        listener: LocalWorkersListener,
        say: Callable[[str], None],
        memory_checkpoints: SnapshotStore | None = None,
        on_snapshot: Callable[[int], None] | None = None,
        awaits_snapshots: bool = False,
    ) -> None:
        """`on_snapshot(worker)` is called when a worker has finished a snapshot. With `awaits_snapshots`, no worker is
        forked before `snapshots_arrived` is called.
        """
        self.alive = {assignment.rank: assignment for assignment in assignments}
        self._template = template
        self._parent, self._loop, self._listener, self._say = parent, loop, listener, say
        self._memory_checkpoints, self._on_snapshot = memory_checkpoints, on_snapshot
        self._awaits_snapshots, self._is_parent_ready = awaits_snapshots, False
        self._channels: dict[int, MessageStream] = {}
        self._pids: dict[int, int] = {}
        self._killed_pids: set[int] = set()  # of workers that were killed one by one and have not ended yet
        self._killed_before_start: dict[int, int] = {}  # rank -> workers killed before their start was reported
        self._unstarted: dict[int, str] = {}  # why workers that join later could not be started
        self._inline_workers: set[int] = set()  # workers in this process
        self._has_forked = False
        self._parent_loss = ""  # how the warm parent was lost for good
        self._num_parent_restarts = 0
        self._is_ending = False
        self._oom_kills = [oom_kills_here()] * 2  # until some seconds ago, and a moment later
        self._oom_look_at = 0.0
        self._kill_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def grace_s(self) -> float:
        """How long workers may take to save and leave."""
        return self._template.job.grace_s

    @property
    def have_all_ended(self) -> bool:
        """Whether every worker that was ever started has ended, including those killed one by one."""
        return not (self.alive or self._killed_pids or any(self._killed_before_start.values()))

    def start(self) -> None:
        """Make the workers' directories, and fork them as soon as the warm parent is ready."""
        for assignment in self.alive.values():
            self._make_directory(assignment)
        if self._parent is not None:
            self._parent.attach(self._loop, on_message=self._on_parent_message, on_lost=self._parent_lost)

    def snapshots_arrived(self) -> None:
        """Fork the workers now: the snapshots that they restart from have arrived."""
        self._awaits_snapshots = False
        if self._is_parent_ready and not self._is_ending and not self._has_forked:
            self._fork_all()

    def add_inline(self, worker: int, channel: socket.socket) -> None:
        """Serve a worker that runs in this process; it gets no signals, and `inline_exited` reports its end."""
        self._inline_workers.add(worker)
        self._serve(worker, channel)

    def inline_exited(self, worker: int, *, pid: int, exit_code: int, peak_memory_bytes: int) -> None:
        """A worker in this process has ended."""
        self._pids[worker] = pid
        self._report_exit(worker, exit_code, None, peak_memory_bytes)

    def send(self, worker: int, message: Mapping[str, Any]) -> None:
        """Send a worker an answer or a message; do nothing if it has ended."""
        if worker in self._channels:
            self._channels[worker].send(message)

    def add(self, worker: int, *, workers: int, incarnation: int) -> None:
        """Start one more worker of a run that then has `workers` workers; it joins the others between two steps.

        `incarnation` is its replica's. If it cannot be started, the next `tick` reports it as lost, and not this call,
        because the caller is in the middle of a decision.
        """
        if self._is_ending or self._parent is None:
            return
        taken = {assignment.local_rank for assignment in self.alive.values()}
        assignment = dataclasses.replace(
            self._template,
            rank=worker,
            workers=workers,
            local_rank=next(number for number in itertools.count() if number not in taken),
            local_workers=max(self._template.local_workers, len(taken) + 1),
            worker_dir=str(worker_dir(Path(self._template.run_dir), self._template.attempt, worker)),
            command_started=clock.now(),
            joins=True,
            begins_at=None,  # it gets the newest state from the other workers
            incarnation=incarnation,
        )
        self.alive[worker] = assignment
        if self._parent_loss:
            self._unstarted[worker] = self._parent_loss
            return
        self._make_directory(assignment)
        if self._has_forked:  # otherwise it is forked once the warm parent is ready
            self._fork(assignment)

    def kill_worker(self, worker: int) -> None:
        """Send SIGKILL to one worker's process group."""
        if worker not in self.alive or self._parent is None:
            return
        is_unstarted = self._unstarted.pop(worker, None) is not None
        if is_unstarted or not self._has_forked:
            del self.alive[worker]
            return
        self._parent.signal(worker, signal.SIGKILL)
        # A successor may start before this end is reported, so its pid must no longer name the rank.
        if worker in self._pids:
            self._killed_pids.add(self._pids.pop(worker))
        else:
            self._killed_before_start[worker] = self._killed_before_start.get(worker, 0) + 1
        del self.alive[worker]
        if worker in self._channels:
            self._channels.pop(worker).close()

    @property
    def snapshots(self) -> tuple[StoredSnapshot, ...]:
        """The snapshots that this host has in memory."""
        return () if self._memory_checkpoints is None else self._memory_checkpoints.snapshots

    def drop_state(self, worker: int) -> None:
        """Free the snapshots of a worker that has left for good."""
        if self._memory_checkpoints is not None:
            self._memory_checkpoints.drop(worker)

    def request_stacks(self, worker: int) -> None:
        """Make a worker write its Python stacks into its directory, but not a worker in this process, which may be in
        a debugger.
        """
        if worker in self._pids and worker in self.alive and self._parent is not None:
            self._parent.signal(worker, STACK_SIGNAL, alone=True)

    def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to all process groups, and SIGKILL after `grace_s` seconds to those that are left.

        A process that was stopped (SIGSTOP) is continued: before that no SIGTERM reaches it.
        """
        if not self._is_ending:
            self._is_ending = True
            for worker in self.alive:
                # Without this message a worker takes SIGTERM as a request to save and leave.
                self.send(worker, {"op": "end"})
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            self._kill_at = time.monotonic() + grace_s

    def kill(self) -> None:
        """Send SIGKILL to all process groups."""
        self._is_ending = True
        self._kill_at, self._give_up_at = None, time.monotonic() + KILL_TIMEOUT_S
        self._signal(signal.SIGKILL)

    def tick(self, now: float) -> None:
        """Report workers that could not be started or are stuck, and send SIGKILL when the grace time is over."""
        if now >= self._oom_look_at:
            self._oom_look_at = now + OOM_LOOK_S
            self._oom_kills = [self._oom_kills[1], oom_kills_here()]
        if self._memory_checkpoints is not None:
            self._memory_checkpoints.tidy()
        for worker in tuple(self._unstarted):
            if worker in self._unstarted:  # otherwise it was ended in the meantime, together with its replica
                self._report_lost(
                    worker, "WarmParentLost" if self._parent_loss else "NotStarted", self._unstarted.pop(worker)
                )
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
        if self._parent is not None and not self._parent_loss:
            self._parent.tick(now, owes=self._awaits_parent, say=self._say)
        is_unheard = self._parent is not None and self._parent.is_silent  # they may have ended, or not got the signal
        if self._give_up_at is not None and now >= self._give_up_at and not is_unheard:
            self._give_up_at = None
            for worker in [*self.alive.keys() - self._inline_workers]:
                self._report_lost(
                    worker, STUCK, f"worker {worker} did not end within {KILL_TIMEOUT_S:.0f} s of SIGKILL"
                )

    @property
    def _awaits_parent(self) -> bool:
        """Whether the warm parent has something to report: a fork, or an end that shows here already, or is due."""
        if not self._is_parent_ready or self._killed_pids or any(self._killed_before_start.values()):
            return True
        forked = self.alive.keys() - self._inline_workers - self._unstarted.keys() if self._has_forked else set[int]()
        return any(self._is_ending or one not in self._pids or one not in self._channels for one in forked)

    def close(self, *, keeps_parent: bool = False) -> None:
        """End all processes in bounded time. With `keeps_parent` the warm parent stays for the next start."""
        if self._parent is not None and keeps_parent and not self._parent_loss:
            self._parent.detach()
        elif self._parent is not None:
            self._parent.close()
        while self._channels:
            self._channels.popitem()[1].close()

    def _make_directory(self, assignment: Assignment) -> None:
        directory = Path(assignment.worker_dir)
        try:
            make_run_directory(assignment.run_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "error.json").unlink(missing_ok=True)  # of an earlier start of the same attempt
        except OSError as error:
            why = f"Cannot make the log directory {directory}: {error.strerror}"
            self._cannot_start(assignment, why, "Make room there, or use another run directory (--run-dir)", error)

    def _fork_all(self) -> None:
        self._has_forked = True
        for assignment in self.alive.values():
            self._fork(assignment)

    def _fork(self, assignment: Assignment) -> None:
        worker = assignment.rank
        if self._parent is None or worker in self._inline_workers or worker in self._unstarted:
            return
        try:
            memory_checkpoint = (
                ()
                if self._memory_checkpoints is None
                else self._memory_checkpoints.file_descriptors_for(worker, step=assignment.begins_at)
            )
            ours, theirs = socket.socketpair()
            self._serve(worker, ours)
            self._parent.fork(assignment, theirs, memory_checkpoint=memory_checkpoint)
        except OSError as error:
            if worker in self._channels:
                self._channels.pop(worker).close()
            remedy = "Raise the limit on open files (ulimit -n), or use fewer workers on this host"
            self._cannot_start(assignment, f"No channel for worker {worker}: {error.strerror}", remedy, error)
        except LookupError as error:
            raise LaunchError(f"Worker {worker} has no state to start from: {error}.") from error

    def _cannot_start(self, assignment: Assignment, why: str, remedy: str, error: Exception | None = None) -> None:
        """Raise LaunchError if this worker starts the run. A worker that joins later counts as lost instead."""
        if not assignment.joins:
            raise LaunchError(f"{why}. {remedy}.") from error
        self._unstarted[assignment.rank] = why
        self._say(f"{why}. {remedy}.")

    def _serve(self, worker: int, channel: socket.socket) -> None:
        def closed(error: Exception) -> None:
            if self._channels.get(worker) is link:  # otherwise its successor has another channel
                del self._channels[worker]
            if isinstance(error, ValueError):  # otherwise the worker has ended, which the warm parent reports
                self._say(f"worker {worker}'s channel was closed: {error}")

        link = self._channels[worker] = MessageStream(
            channel, self._loop, on_message=lambda request: self._on_worker_message(worker, request), on_close=closed
        )

    def _on_worker_message(self, worker: int, request: Mapping[str, Any]) -> None:
        if request.get("op") == "begun" and self._parent is not None:
            self._parent.let_orphans_finish(self.grace_s)
        if request.get("op") == "kept":  # snapshots concern this host only
            if self._on_snapshot is not None:
                self._on_snapshot(worker)
            return
        self._listener.request(worker, request)

    def _on_parent_message(self, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ready":
                self._check_ready(message)
                self._is_parent_ready = True
                if not self._is_ending and not self._awaits_snapshots:
                    self._fork_all()
            case "failed":
                error = ": ".join(filter(None, (message["kind"], message["message"])))
                what, lacks = f"An import of the workers' modules failed: {error}", lacks_memory(error)
                what += f". {MEMORY_REMEDY}" * lacks
                raise LaunchError(f"{what}\n\n{message['traceback'].rstrip()}", is_accident=lacks)
            case "started" if self._killed_before_start.get(message["worker"], 0) > 0:
                self._killed_before_start[message["worker"]] -= 1
                self._killed_pids.add(message["pid"])
            case "started":
                self._pids[message["worker"]] = message["pid"]
                self._listener.started(message["worker"], message["pid"])
            case "not_started" if self._killed_before_start.get(message["worker"], 0) > 0:
                self._killed_before_start[message["worker"]] -= 1
            case "not_started":
                why = f"worker {message['worker']} could not be forked: {message['reason']}"
                remedy = "Free memory or processes (ulimit -u, the container's pids limit), or use fewer workers"
                self._cannot_start(self.alive[message["worker"]], why, remedy)
            case "exited" if message["pid"] in self._killed_pids:
                self._killed_pids.discard(message["pid"])
            case "exited" if message["worker"] not in self.alive:
                pass  # it was reported as stuck, and has ended after all
            case "exited":
                self._report_exit(
                    message["worker"],
                    message["exit_code"],
                    message["signal"],
                    message["peak_memory_bytes"],
                    is_early=message["is_early"],
                )
            case op:
                raise LaunchError(
                    f"the warm parent sent an unknown message {op!r}: is its Paceline of another version?"
                )

    def _check_ready(self, message: Mapping[str, Any]) -> None:
        if message["devices_touched"]:
            raise LaunchError(
                "An accelerator was opened while workers' modules were imported; forked workers could not use it."
            )
        if message["threads"]:
            names = ", ".join(message["threads"])
            self._say(f"threads are running before the workers are forked, which may stall them: {names}")
        if self._parent is not None and (output := self._parent.output()):
            self._say(f"while importing: {output}")

    def _signal(self, signum: int) -> None:
        for worker in [*self.alive.keys() - self._inline_workers]:
            if self._has_forked and self._parent is not None:
                self._parent.signal(worker, signum)
            else:
                self._report_exit(worker, None, signum, 0)  # it was not forked, and will not be

    def _report_exit(
        self, worker: int, exit_code: int | None, signum: int | None, peak_memory_bytes: int, *, is_early: bool = False
    ) -> None:
        directory = Path(self.alive[worker].worker_dir)
        error = read_error(directory) if exit_code != 0 or is_early else None
        with contextlib.suppress(OSError):  # left behind by a killed worker; if this fails, a small hidden file stays
            (directory / ERROR_SPARE).unlink(missing_ok=True)
        self._report(
            WorkerExit(
                worker=worker,
                host=self.alive[worker].host,
                pid=self._pids.get(worker, 0),
                exit_code=exit_code,
                signal=signum,
                peak_memory_bytes=peak_memory_bytes,
                error=error,
                sent_by_us=self._is_ending,
                is_early=is_early,
                is_out_of_memory=self._was_out_of_memory(signum),
                name="" if self._template.job.servers is None else task_name(self._template.job, worker),
            )
        )

    def _was_out_of_memory(self, signum: int | None) -> bool:
        """Whether this worker's end is one that the kernel has counted as such in the last seconds."""
        if signum != signal.SIGKILL or self._is_ending:
            return False
        before, now = self._oom_kills[0], oom_kills_here()
        if before is None or now is None or now <= before:
            return False
        self._oom_kills = [one if one is None else one + 1 for one in self._oom_kills]  # it explains one end
        return True

    def _report_lost(self, worker: int, kind: str, message: str, *, echo: bool = False) -> None:
        self._report(
            lost_worker(
                worker,
                host=self.alive[worker].host,
                pid=self._pids.get(worker, 0),
                kind=kind,
                message=message,
                echo=echo,
                sent_by_us=self._is_ending,
            )
        )

    def _report(self, ended: WorkerExit) -> None:
        del self.alive[ended.worker]
        self._unstarted.pop(ended.worker, None)
        # Otherwise this pid would be taken for that of a successor that is killed early.
        self._pids.pop(ended.worker, None)
        self._listener.exited(ended)

    def _parent_lost(self, how: str) -> None:
        parent, had_forked = self._parent, self._has_forked
        if parent is None:
            return
        output, was_killed = f"\n{parent.output()}".rstrip(), parent.was_killed
        is_back = self._restart_parent(parent, how, with_it=had_forked) if had_forked or was_killed else False
        if not had_forked:
            if not is_back:
                lacks = lacks_memory(output)
                remedy = f" {MEMORY_REMEDY}." if lacks else ""
                text = f"The process that imports the workers' modules {how}.{remedy}{output}"
                raise LaunchError(text, is_accident=was_killed or lacks)
            return
        # With it, all that it had forked has ended.
        self._killed_pids.clear()
        self._killed_before_start.clear()
        loss = f"the process that the workers were forked from {how}{output}"
        if not is_back:
            self._parent_loss = loss
            self._listener.cannot_fork()
        before = {worker: self.alive[worker] for worker in sorted(self.alive.keys() - self._inline_workers)}
        for number, (worker, assignment) in enumerate(before.items()):
            # Otherwise it was ended meanwhile, or its successor is to be started.
            if self.alive.get(worker) is assignment and worker not in self._unstarted:
                self._report_lost(worker, "WarmParentLost", loss, echo=number > 0)

    def _restart_parent(self, parent: WarmParent, how: str, *, with_it: bool) -> bool:
        """Start the warm parent again after it was lost, `with_it` its workers; return whether that is possible."""
        if self._num_parent_restarts >= MAX_PARENT_RESTARTS:
            return False
        self._num_parent_restarts += 1
        self._has_forked = self._is_parent_ready = False
        try:
            parent.restart()
            parent.attach(self._loop, on_message=self._on_parent_message, on_lost=self._parent_lost)
        except LaunchError:
            self._has_forked = True
            return False
        lost = "; the workers of this host are lost with it" if with_it else ""
        self._say(f"the process that workers are forked from {how}: it is started again{lost}")
        return True
