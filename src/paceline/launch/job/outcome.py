"""How workers ended, and the job's outcome and exit code that follow: data and pure functions.

The coordinator collects every worker's end in `WorkerExits` and decides when the other workers are ended. `verdict`
then gives the outcome: finished, failed, or stopped, and whether workers were only lost and may restart.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import clock
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW, Finish
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan
from paceline.plain_data import finite, read_object, whole
from paceline.regular_files import read_regular

__all__ = [
    "STUCK",
    "Failure",
    "JobOutcome",
    "RecoverableLoss",
    "WorkerExit",
    "WorkerExits",
    "interrupted",
    "is_root_loss",
    "lost_worker",
    "only_hosts_lost",
    "read_error",
    "saved_and_left",
    "verdict",
]

# A script or a batch system that starts runs should run exit codes 75 and 76 again, but not 1 and 2.

LOST_KINDS = ("HostLost", "WarmParentLost")  # kinds of errors that the user's program did not cause
ERROR_BYTES = 1 << 20  # longest error.json; Paceline writes none that is longer
STUCK = "WorkerStuck"  # kind of the error of a process that has not ended after SIGKILL
TEXT_CHARS = 8192  # longest text kept in an error, since one message carries many; the file has the whole text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """How one worker ended."""

    worker: int
    host: str
    pid: int
    exit_code: int | None  # None: killed by `signal`, or lost
    signal: int | None
    peak_memory_bytes: int
    error: Mapping[str, Any] | None  # the content of error.json
    sent_by_us: bool  # its supervisor had told it to end
    is_early: bool = False  # its process ended before its function had returned, whatever its exit code says
    is_out_of_memory: bool = False  # the kernel killed it for want of memory
    name: str = ""  # what messages call it (paceline.plan.program_tasks); "": "worker" and its rank

    @property
    def has_left(self) -> bool:
        """Whether it saved and left, as all workers were told to."""
        return self.exit_code in (PREEMPTED, TOO_FEW) and self.error is None and not self.is_early

    @property
    def failed(self) -> bool:
        return self.is_early or (self.exit_code != 0 and not self.has_left)

    @property
    def is_loss(self) -> bool:
        """Whether it was killed, lost with its host or disconnected; its own program did not fail."""
        return self.failed and (self.exit_code is None or bool((self.error or {}).get("echo")))

    @property
    def cause(self) -> str:
        """Return "worker 2 (pid 4711) killed by signal 9", or what is known of a loss without a signal."""
        error, name = self.error or {}, self.name or f"worker {self.worker}"
        if self.signal is not None:
            return str(error.get("cause") or f"{name} (pid {self.pid}) killed by signal {self.signal}")
        return str(error.get("cause") or error.get("message") or f"{name} was lost")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerExit:
        """Read what `dataclasses.asdict` wrote; raise TypeError if it is something else."""
        made = cls(**data)
        numbers = (made.worker, made.pid, made.peak_memory_bytes, made.exit_code or 0, made.signal or 0)
        if not all(isinstance(number, int) for number in numbers) or not isinstance(made.error or {}, dict):
            raise TypeError(f"not a worker's end: {data}")
        return made


Failure = WorkerExit  # a `WorkerExit` that `failed`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoverableLoss:
    """A loss after which no remaining worker can go on, but all can restart from state that the run keeps."""

    causes: tuple[str, ...]
    lost: tuple[int, ...]  # workers, without those that were ended because of others
    keeps: bool = True  # the state is in memory; False: no worker was lost, and all restart from disk
    micro: int | None = None  # samples of a micro-batch, where the memory was too little for more
    workers_each: int | None = None  # workers of each elastic replica; None: the number of replicas is fixed
    least: int = 1  # fewest elastic replicas
    workers: int = 0  # number of workers that restart
    hosts: tuple[RemainingHost, ...] = ()  # where they restart, with the snapshots in memory there
    lost_at: float = dataclasses.field(default=0.0, compare=False)  # clock.now()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How the job ended on all hosts.

    Exit codes: 0 finished, 1 failed, 2 usage error, 75 and 76 run it again to go on from saved state
    (`paceline.elastic.membership_messages`), 128 + n stopped by signal n.
    """

    state: str  # "finished" | "failed" | "stopped"
    exit_code: int
    failures: tuple[Failure, ...] = ()
    reason: str = ""  # one sentence, if `failures` do not explain it
    exits: tuple[WorkerExit, ...] = ()  # of all workers, by worker
    recoverable_loss: RecoverableLoss | None = None  # workers were lost, none failed by itself, and all may restart
    restart_plan: RestartPlan | None = None  # how all restart, if they do
    is_superseded: bool = False  # another coordinator has taken over: the run's record is not this host's any more

    @property
    def may_restart(self) -> bool:
        return self.recoverable_loss is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`; only `failures` keep the content of error.json."""
        exits = tuple(dataclasses.replace(ended, error=None) for ended in self.exits)  # failures hold the errors
        restart_plan = None if self.restart_plan is None else self.restart_plan.to_json()
        data = dataclasses.asdict(dataclasses.replace(self, exits=exits, recoverable_loss=None, restart_plan=None))
        del data["recoverable_loss"], data["restart_plan"]
        return {**data, "broken": None, "again": restart_plan}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobOutcome:
        """Read what `to_json` returned; raise TypeError or KeyError if it is something else."""
        restart_plan = None if data["again"] is None else RestartPlan.from_json(data["again"])
        return cls(
            state=data["state"],
            exit_code=data["exit_code"],
            failures=tuple(map(WorkerExit.from_json, data["failures"])),
            reason=data["reason"],
            exits=tuple(map(WorkerExit.from_json, data["exits"])),
            recoverable_loss=None
            if restart_plan is None
            else RecoverableLoss(causes=tuple(restart_plan.restarted.causes), lost=()),
            restart_plan=restart_plan,
        )


def verdict(exits: Sequence[WorkerExit], *, keeps_state: bool = False) -> JobOutcome:
    """Return the outcome once all workers have ended and no signal stopped the job.

    If workers were only lost, and none failed by itself, the exit code recommends the same command again. With
    `keeps_state` the outcome then has a `recoverable_loss`: all may restart at once.
    """
    failures = tuple(exit for exit in exits if exit.failed)
    if not failures:
        return JobOutcome(state="finished", exit_code=0, exits=tuple(exits))
    causes = [exit.error or {} for exit in failures if not exit.sent_by_us and not (exit.error or {}).get("echo")]
    usage = bool(causes) and all(error.get("usage") for error in causes)
    roots = [ended for ended in exits if is_root_loss(ended)]
    recoverable_loss = RecoverableLoss(
        causes=tuple(ended.cause for ended in roots), lost=tuple(ended.worker for ended in roots)
    )
    is_lost = _only_lost(failures)
    were_taken = is_lost and all(map(_was_taken, roots))
    return JobOutcome(
        state="failed",
        exit_code=2 if usage else TOO_FEW if were_taken else 1,
        failures=failures,
        reason=", ".join(recoverable_loss.causes) if were_taken else "",
        exits=tuple(exits),
        recoverable_loss=recoverable_loss if keeps_state and is_lost else None,
    )


def is_root_loss(ended: WorkerExit) -> bool:
    """Return whether this worker was lost by itself, not as a consequence of another worker's end."""
    return ended.is_loss and not ended.sent_by_us and not (ended.error or {}).get("echo")


def only_hosts_lost(outcome: JobOutcome) -> bool:
    """Return whether a job failed because a host was lost, and for nothing else."""
    return bool(outcome.failures) and all(map(_came_of_lost_host, outcome.failures))


def _came_of_lost_host(ended: WorkerExit) -> bool:
    error = ended.error or {}
    return error.get("kind") == "HostLost" or bool(error.get("echo")) or ended.sent_by_us


def _was_taken(ended: WorkerExit) -> bool:
    """Return whether a lost worker was killed from outside (a user, a cluster, the OOM killer) or lost with its host.

    Other signals, such as SIGSEGV and SIGABRT, come from the program itself.
    """
    return ended.signal == signal.SIGKILL or (ended.error or {}).get("kind") in LOST_KINDS


def _only_lost(failures: Sequence[Failure]) -> bool:
    """Return whether workers were lost, none failed by itself, and no process is stuck."""
    have_ended = all((ended.error or {}).get("kind") != STUCK for ended in failures)
    return have_ended and any(map(is_root_loss, failures)) and all(one.is_loss or one.sent_by_us for one in failures)


def saved_and_left(finish: Finish, exits: Sequence[WorkerExit]) -> JobOutcome:
    """Return the outcome of a job whose workers have saved and left as they were told."""
    return JobOutcome(state="stopped", exit_code=finish.exit_code, reason=finish.reason, exits=tuple(exits))


def interrupted(signum: int, exits: Sequence[WorkerExit], *, by: str = "") -> JobOutcome:
    """Return the outcome of a job that a signal to a supervisor stopped; its workers' exits are no failures."""
    reason = f"stopped by {signal.Signals(signum).name}{by}"
    return JobOutcome(state="stopped", exit_code=128 + signum, reason=reason, exits=tuple(exits))


def lost_worker(
    worker: int,
    *,
    host: str,
    pid: int,
    kind: str,
    message: str,
    echo: bool = False,
    sent_by_us: bool = False,
    names_workers: bool = False,
) -> WorkerExit:
    """Return the exit of a worker of which nothing is known but `message`.

    `names_workers`: the message already names the workers, so it is shown alone.
    """
    error = {
        "kind": kind,
        "message": message,
        "traceback": "",
        "worker": worker,
        "host": host,
        "pid": pid,
        "step": None,
        "time": clock.now(),
        "usage": False,
        "echo": echo,
        "says_all": names_workers,
        "names_workers": names_workers,
    }
    return WorkerExit(
        worker=worker,
        host=host,
        pid=pid,
        exit_code=None,
        signal=None,
        peak_memory_bytes=0,
        error=error,
        sent_by_us=sent_by_us,
    )


def read_error(worker_dir: Path) -> dict[str, Any] | None:
    """Return the content of error.json with long texts shortened; None if it is missing or incomplete."""
    try:
        error = read_object(read_regular(worker_dir / "error.json", ERROR_BYTES))
        error["time"] = finite(error["time"]) if error.get("time") is not None else None
        error["step"] = whole(error["step"]) if error.get("step") is not None else None
    except (OSError, ValueError):
        return None
    message, trace = str(error.get("message", "")), str(error.get("traceback", ""))
    if len(message) > TEXT_CHARS:
        error["message"] = message[:TEXT_CHARS] + " ..."
    if len(trace) > TEXT_CHARS:
        error["traceback"] = "...\n" + trace[-TEXT_CHARS:]  # the end of a traceback names the exception
    return error


class WorkerExits:
    """Collects how workers ended. The job ends once none of the expected `workers` is `missing`."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.by_worker: dict[int, WorkerExit] = {}
        self.finish: Finish | None = None  # what all workers were told, once the run is to end
        self._expected = set(workers)
        # Workers that are ended because they hang -> the error that explains it.
        self._hung: dict[int, Mapping[str, Any]] = {}
        self._signum: int | None = None  # the signal that stopped the job
        self._by = ""  # where it came, if on another host

    # Which workers' exits the job waits for.

    def expect(self, workers: Iterable[int]) -> None:
        """Wait for these workers' exits; forget earlier exits of the same ranks."""
        for worker in workers:
            self._expected.add(worker)
            self.by_worker.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Do not wait for this worker's exit any more."""
        self._expected.discard(worker)

    @property
    def expected(self) -> frozenset[int]:
        """The workers that belong to the job, ended or not."""
        return frozenset(self._expected)

    def is_expected(self, worker: int) -> bool:
        """Return whether this worker belongs to the job, ended or not."""
        return worker in self._expected

    @property
    def missing(self) -> frozenset[int]:
        """Expected workers that have not ended."""
        return frozenset(self._expected - self.by_worker.keys())

    # What is known.

    def is_awaited(self, ended: WorkerExit) -> bool:
        """Return whether this is the first report of an expected worker's exit."""
        return ended.worker in self.missing

    def note_hung(self, worker: int, error: Mapping[str, Any]) -> None:
        """A worker is ended because it hangs; `error` replaces the cause that its exit will report."""
        self._hung[worker] = error

    def with_cause(self, ended: WorkerExit) -> WorkerExit:
        """Return a worker's exit, with the hang as its cause if it was ended for that."""
        if ended.worker not in self._hung:
            return ended
        error = self._hung[ended.worker]
        return dataclasses.replace(ended, exit_code=None, signal=None, error=error, sent_by_us=False)

    def note(self, ended: WorkerExit) -> None:
        """Record that a worker has ended."""
        self.by_worker[ended.worker] = ended

    def end_job_for_hang(self, error: Mapping[str, Any]) -> None:
        """Record a hang that ends the job as the failure of the worker that it names."""
        worker = int(error["worker"])
        ended = lost_worker(worker, host=error["host"], pid=error["pid"], kind=error["kind"], message=error["message"])
        self.by_worker[worker] = dataclasses.replace(ended, error=error)

    def pop_failures(self) -> list[WorkerExit]:
        """Remove and return the failures so far; the caller handles them again."""
        failed = [ended for ended in self.by_worker.values() if ended.failed]
        for ended in failed:
            del self.by_worker[ended.worker]
        return failed

    @property
    def has_failures(self) -> bool:
        return any(ended.failed for ended in self.by_worker.values())

    def stop(self, signum: int, *, by: str = "", anyway: bool = False, to_all_hosts: bool = False) -> None:
        """Record that a signal stopped the job. A job that has already failed stays failed, unless `anyway`.

        `to_all_hosts`: the signal may have gone to all hosts at once, and one of them ended first. So a lost host is no
        failure.
        """
        # A signal to a whole control group also ends the workers, and such ends are not failures.
        failures = [ended for ended in self.by_worker.values() if ended.failed]
        if anyway or all(
            ended.signal == signum or ended.exit_code == 128 + signum or (to_all_hosts and _came_of_lost_host(ended))
            for ended in failures
        ):
            self._signum, self._by = signum, by

    # What follows.

    @property
    def have_all_left(self) -> bool:
        """Whether all workers have saved and left, as they were told."""
        ended = self.by_worker.values()
        return self._signum is None and self.finish is not None and bool(ended) and all(one.has_left for one in ended)

    @property
    def stopped(self) -> JobOutcome | None:
        """The outcome if a signal stopped the job, else None."""
        return None if self._signum is None else interrupted(self._signum, self._in_order, by=self._by)

    @property
    def outcome(self) -> JobOutcome:
        """The outcome of the job from the exits so far."""
        if self.finish is not None and self.have_all_left:
            return saved_and_left(self.finish, self._in_order)
        return self.stopped or verdict(self._in_order)

    @property
    def _in_order(self) -> list[WorkerExit]:
        return [self.by_worker[worker] for worker in sorted(self.by_worker)]
