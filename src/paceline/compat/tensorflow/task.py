"""One task of a TensorFlow program, from its first to its last instruction: the entry of each process of the run.

The process that is forked for the task imports neither torch nor TensorFlow. It reserves a port, exchanges addresses
with the other tasks through the run's key-value store, and starts the program in a Python of its own. Then it waits:
for the program's end, for the chief's, for orders of the supervisor, and for SIGTERM.

- A program that ends with an error ends the run, and its traceback is shown once.
- A program that a signal has ended is lost. A worker beside parameter servers is started again alone. Any other loss
  is passed on: this process ends by the same signal, and the supervisor starts all tasks again.
- What only serves a chief is ended when the chief's program has ended well.
- At SIGTERM the programs get SIGTERM, too, and may save. However they end then, and also where they have to be
  killed near the end of the grace time, the task leaves in good order.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import clock, environment
from paceline.comm.messages.json_channel import Channel, ChannelClosed
from paceline.compat.tensorflow.cluster import TaskPlace, address_text, places_of
from paceline.compat.tensorflow.program_environment import device_text, program_environment
from paceline.compat.tensorflow.program_process import ProgramProcess
from paceline.compat.tensorflow.program_watch import ProgramWatch
from paceline.compat.tensorflow.reserved_port import ReservedPort
from paceline.compat.tensorflow.supervisor_orders import SupervisorOrders
from paceline.compat.tensorflow.task_end import TaskIdentity, error_fields, is_aborted_by_peer, loss_fields
from paceline.elastic.membership_messages import PREEMPTED
from paceline.errors import LaunchError, PacelineError, PlanError, writing
from paceline.events import EventLog, TaskLost, TaskReady, TaskStarted, Warned, WorkerFinished, WorkerStarted
from paceline.plan.job import Assignment
from paceline.private_files import make_run_directory

__all__ = ["work"]

POLL_S = 0.1  # between two looks at the program
LOOK_S = 0.5  # between two looks at whether the chief has ended, and whether the program listens
READY_S = 300.0  # without a server for so long, a program is taken for one that opens none
LEAVE_S = 3.0  # of the grace time, for this process and the supervisor
END_S = 5.0  # from SIGTERM to SIGKILL, for a program that has no more work
ORDER_S = 10.0  # after SIGTERM the supervisor's order comes by then; otherwise the task ends by the signal
ADDRESS, OVER = "paceline/task/{}/address", "paceline/task/over"  # in the key-value store
QUICK_LOSS_S, MOST_QUICK_LOSSES = 60.0, 3  # a task that is lost so soon, so often in a row, is not started again alone


def work(assignment: Assignment) -> int:
    """Be this task of the run; returns the exit status. A lost program ends this process by the same signal."""
    faulthandler.enable()
    with writing(Path(assignment.worker_dir)):
        make_run_directory(assignment.run_dir)
        Path(assignment.worker_dir).mkdir(parents=True, exist_ok=True)
    task = _Task(assignment)
    try:
        return task.run()
    except PacelineError as error:
        return task.failed(error)
    except ChannelClosed:  # the supervisor is lost before the program was started, or just when it had ended
        return PREEMPTED


class _Task:
    """The state of this process."""

    def __init__(self, assignment: Assignment) -> None:
        job = assignment.job
        self._assignment, self._job = assignment, job
        self._places = places_of(assignment.workers, job.servers)
        self._place: TaskPlace = self._places[assignment.rank]
        self._worker_dir = Path(assignment.worker_dir)
        self._who = TaskIdentity(rank=assignment.rank, host=assignment.host, log=str(self._worker_dir / "stderr.log"))
        self._events = EventLog(self._worker_dir / "events.jsonl", worker=assignment.rank)
        self._channel = Channel.inherited(assignment.channel_fd)
        self._orders = SupervisorOrders(self._channel)
        self._notices = tuple(int(signum) for signum in environment.notice_signals() if signum != signal.SIGTERM)
        self._is_terminated = False  # SIGTERM, or another warning, has come
        self._asked_at: float | None = None  # when the supervisor was told of that
        self._leaves_with: int | None = None  # exit code, where all leave
        self._is_ending = False  # the supervisor ends all tasks
        self._is_over = False  # the chief has ended well
        self._look_at = self._look_ready_at = 0.0
        self._restarts = self._quick_losses = 0
        self._port: ReservedPort | None = None  # None: the task is alone
        self._is_ready = False  # its program listens at the port

    def run(self) -> int:
        """Start the program and look after it until this task has ended; returns the exit status."""
        for signum in (signal.SIGTERM, *self._notices):
            signal.signal(signum, self._note_termination)
        self._port = ReservedPort() if len(self._places) > 1 else None
        told = self._exchange(self._port)
        if told is None:
            return self._left()
        variables = program_environment(self._assignment, self._places, told)
        self._warn_of_open_network()
        while True:
            code = self._run_program(variables)
            if code is not None:
                return code

    def failed(self, error: PacelineError) -> int:
        """Report an error of the job or of the launch; returns the exit status."""
        usage = isinstance(error, PlanError)
        kind, trace = type(error).__name__, "".join(traceback.format_exception(error))
        said = {"kind": kind, "message": str(error), "traceback": trace, "echo": False, "says_all": True}
        self._write_error({**self._who.fields(os.getpid()), **said, "usage": usage})
        return 2 if usage else 1

    # The other tasks, and the supervisor.

    def _exchange(self, port: ReservedPort | None) -> dict[int, dict[str, Any]] | None:
        """Tell the others where this task is, and return what all have told, by rank; None: this task is to leave
        first. Raise LaunchError where one does not come in time."""
        own = self._assignment
        address = "" if port is None else address_text(own.address, port.number)
        self._set(ADDRESS.format(own.rank), json.dumps({"address": address, "host_index": own.host_index}))
        keys = {rank: ADDRESS.format(rank) for rank in range(len(self._places))}
        deadline = time.monotonic() + self._job.timeout_s
        while not self._channel.call("check", keys=[*keys.values()]):
            self._hear(POLL_S)
            if self._has_to_go:
                return None
            if time.monotonic() > deadline:
                missing = [rank for rank, key in keys.items() if not self._channel.call("check", keys=[key])]
                names = ", ".join(self._places[rank].name for rank in missing)
                raise LaunchError(
                    f"{names} did not come within {self._job.timeout_s:.0f} s (timeout_s): look at its host, or raise "
                    "--timeout-s.",
                    is_accident=True,
                )
        return {rank: json.loads(self._get(key)) for rank, key in keys.items()}

    def _set(self, key: str, text: str) -> None:
        self._channel.call("set", key=key, value=base64.b64encode(text.encode()).decode())

    def _get(self, key: str) -> str:
        return base64.b64decode(self._channel.call("get", key=key)).decode()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._orders.is_lost = True

    def _hear(self, wait_s: float) -> None:
        """Take the supervisor's orders, and pass a SIGTERM on to it, once."""
        order = self._orders.take(wait_s)
        while order is not None:
            if order.get("op") == "finish":
                self._leaves_with = int(order["exit_code"])
            elif order.get("op") == "end":
                self._is_ending = True
            order = self._orders.take(0.0)
        # An end that the supervisor has ordered comes with SIGTERM; its order was sent before.
        if self._is_terminated and not self._has_to_go and self._asked_at is None:
            self._asked_at = time.monotonic()
            self._send({"op": "leaving", "signal": "SIGTERM"})

    def _note_termination(self, *_: object) -> None:
        self._is_terminated = True

    @property
    def _has_to_go(self) -> bool:
        return self._is_ending or self._leaves_with is not None or self._orders.is_lost

    def _left(self) -> int:
        """The exit status of a task that does not come to its end."""
        if self._leaves_with is not None and not self._is_ending:
            return self._leaves_with
        return PREEMPTED if self._orders.is_lost else 128 + signal.SIGTERM

    def _warn_of_open_network(self) -> None:
        if self._assignment.hosts > 1 and self._assignment.rank == 0 and not self._job.private_network:
            self._events.emit(
                Warned(
                    text="TensorFlow's connections between hosts are not encrypted, and its servers take orders from "
                    "everybody who reaches their ports: use a network that others cannot reach, and say so with "
                    "--private-network"
                )
            )

    # The program.

    def _run_program(self, variables: Mapping[str, str]) -> int | None:
        """Run the program once; return this task's exit status, or None where it is to be started again alone."""
        program = self._start(variables)
        was_asked = False
        watch = ProgramWatch(
            program.pid, self._assignment, name=self._place.name, restarts=self._restarts, events=self._events
        )
        while (code := program.poll()) is None:
            self._hear(POLL_S)
            self._note_ready(program)
            watch.look(is_ready=self._is_ready)
            if not was_asked and (self._has_to_go or self._has_chief_ended()):
                was_asked = True
                grace_s = self._job.grace_s
                # Before the supervisor ends what is late: a program that TensorFlow keeps from ending at SIGTERM, as it
                # does under a strategy of several workers, is no failure.
                program.ask_to_end(END_S if self._is_over else max(grace_s / 2, grace_s - LEAVE_S))
        watch.close()
        return self._ended(program, code)

    def _start(self, variables: Mapping[str, str]) -> ProgramProcess:
        own = self._assignment
        self._is_ready, self._look_ready_at = False, 0.0
        program = ProgramProcess(
            self._job.program,
            self._job.args,
            worker_dir=self._worker_dir,
            environment=variables,
            parent=os.getpid(),
            notices=self._notices,
        )
        if self._restarts == 0:
            self._events.emit(
                WorkerStarted(
                    rank=own.rank,
                    workers=own.workers,
                    host=own.host,
                    pid=program.pid,
                    device=device_text(variables),
                    startup_s=round(clock.now() - own.command_started, 3),
                    plan="",
                    resumed_from_step=0,
                )
            )
            self._send({"op": "keeps"})  # what the program saves outlives it: all can start again after a loss
            self._send({"op": "begun"})  # SIGTERM asks it to leave from now on
        self._events.emit(TaskStarted(rank=own.rank, name=self._place.name, pid=program.pid, restarts=self._restarts))
        return program

    def _note_ready(self, program: ProgramProcess) -> None:
        """Note that the program has imported TensorFlow, and joins its cluster; one that does not listen counts as
        ready after a while."""
        if self._is_ready or time.monotonic() < self._look_ready_at:
            return
        self._look_ready_at = time.monotonic() + LOOK_S
        if self._port is None or self._port.has_listener or program.lasted_s > READY_S:
            self._is_ready = True
            self._events.emit(TaskReady(rank=self._who.rank, name=self._place.name))

    def _has_chief_ended(self) -> bool:
        """Whether this task only serves a chief whose program has ended well."""
        if not self._is_over and self._place.serves and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            try:
                self._is_over = bool(self._channel.call("check", keys=[OVER]))
            except ChannelClosed:
                self._orders.is_lost = True
        return self._is_over

    def _ended(self, program: ProgramProcess, code: int) -> int | None:
        """What follows from the program's end."""
        self._hear(0.0)
        self._look_at = 0.0
        if self._has_chief_ended():
            return self._finish()
        report = program.report
        if not self._has_to_go and code == -signal.SIGTERM:
            self._await_order()
        if self._has_to_go:
            return self._left()
        if code == 0:
            if self._place.drives:
                self._set(OVER, "")
            return self._finish()
        if report is not None or code > 0:
            self._write_error(error_fields(report, code=code, common=self._who.fields(program.pid)))
            return code if code > 0 else 1
        return self._lost(program, -code)

    def _await_order(self) -> None:
        """SIGTERM has ended the program, and is meant for the task, or for the whole run: ask to leave with all."""
        self._is_terminated = True
        deadline = time.monotonic() + ORDER_S
        while not self._has_to_go and time.monotonic() < deadline:
            self._hear(POLL_S)

    def _lost(self, program: ProgramProcess, signum: int) -> int | None:
        """A signal has ended the program: start it again alone, or pass the loss on to the supervisor."""
        is_quick = program.lasted_s < QUICK_LOSS_S
        self._quick_losses = self._quick_losses + 1 if is_quick else 0
        name, place = self._place.name, self._place
        if place.is_replaceable and self._quick_losses < MOST_QUICK_LOSSES:
            reason = f"{name} (pid {program.pid}) killed by signal {signum}"
            self._events.emit(TaskLost(rank=self._who.rank, name=name, pid=program.pid, reason=reason))
            self._restarts += 1
            return None
        is_echo = is_aborted_by_peer(signum, self._worker_dir / "stderr.log")
        common = self._who.fields(program.pid)
        self._write_error(loss_fields(name, signum=signum, pid=program.pid, is_echo=is_echo, common=common))
        self._events.close()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program's own core is the one to look at
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return 128 + signum

    def _finish(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        self._events.emit(WorkerFinished(rank=self._who.rank, step=0, peak_memory_bytes=peak))
        self._events.close()
        return 0

    def _write_error(self, fields: Mapping[str, Any]) -> None:
        path = self._worker_dir / "error.json"
        temporary = path.with_suffix(".new")
        with writing(path):
            temporary.write_text(json.dumps(fields), encoding="utf-8")
            temporary.replace(path)
