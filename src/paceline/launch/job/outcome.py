"""How workers ended, and what follows for the job: data, and the one function that judges.

How the workers of a job have ended so far, and what follows from that when all have: who failed, left, or was lost.

The head hears every end and decides when the others are to end; here is only what is known, and the verdict.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW, Finish
from paceline.launch.job.restart_plan import RemainingHost, RestartPlan

__all__ = [
    "STUCK",
    "Failure",
    "JobOutcome",
    "RecoverableLoss",
    "WorkerExit",
    "WorkerExits",
    "interrupted",
    "is_root_loss",
    "left",
    "lost",
    "read_error",
    "verdict",
]

# What the exit code of a run means to whoever starts runs: 75 and 76, do it again; 1 and 2, do not.

LOST_KINDS = ("HostLost", "WarmParentLost")  # of errors: what took the worker away was no code of the program's
ERROR_BYTES = 1 << 20  # of an error.json, at most: a longer one is not what Paceline writes
STUCK = "WorkerStuck"  # the kind of error of a process that is still there after SIGKILL
TEXT_CHARS = 8192  # of a text in it: hundreds of workers' errors travel in one message; the file holds the whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """How one worker ended."""

    worker: int
    host: str
    pid: int
    exit_code: int | None  # None: killed by `signal`, or lost
    signal: int | None
    peak_memory_bytes: int
    error: Mapping[str, Any] | None  # what is in error.json
    sent_by_us: bool  # it ended after it was told to

    @property
    def has_left(self) -> bool:
        """Whether it ended because everybody was told to save and leave."""
        return self.exit_code in (PREEMPTED, TOO_FEW) and self.error is None

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.has_left

    @property
    def is_loss(self) -> bool:
        """Whether it was lost, and did not fail by its own program: killed, gone with its host, or cut off."""
        return self.failed and (self.exit_code is None or bool((self.error or {}).get("echo")))

    @property
    def cause(self) -> str:
        """Return "worker 2 (pid 4711) killed by signal 9", or what is known of a loss without a signal."""
        if self.signal is not None:
            return f"worker {self.worker} (pid {self.pid}) killed by signal {self.signal}"
        error = self.error or {}
        return str(error.get("cause") or error.get("message") or f"worker {self.worker} was lost")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerExit:
        """Read what `dataclasses.asdict` wrote; raises TypeError where it is not that."""
        made = cls(**data)
        numbers = (made.worker, made.pid, made.peak_memory_bytes, made.exit_code or 0, made.signal or 0)
        if not all(isinstance(number, int) for number in numbers) or not isinstance(made.error or {}, dict):
            raise TypeError(f"not a worker's end: {data}")
        return made


Failure = WorkerExit  # one that `failed`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecoverableLoss:
    """What was lost where nobody who is left can go on, though the run keeps what it takes to begin again."""

    causes: tuple[str, ...]
    lost: tuple[int, ...]  # workers, but for those that were ended because of others
    keeps: bool = True  # in memory: otherwise what was lost was no worker, and all begin again from the disk
    workers_each: int | None = None  # of replicas that come and go, and hold the same; None: their number is fixed
    least: int = 1  # of such replicas
    workers: int = 0  # that may begin again
    hosts: tuple[RemainingHost, ...] = ()  # on which they do, and what is in memory there
    lost_at: float = dataclasses.field(default=0.0, compare=False)  # time.time()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How the job ended on all hosts. Exit codes: 0, 1 failed, 2 a usage error, 75 and 76 to be run again, as it goes
    on from what is saved (`paceline.elastic.membership_messages`), 128 + n stopped by signal n."""

    state: str  # "finished" | "failed" | "stopped"
    exit_code: int
    failures: tuple[Failure, ...] = ()
    reason: str = ""  # one sentence, where `failures` do not say it all
    exits: tuple[WorkerExit, ...] = ()  # of all workers, by worker
    recoverable_loss: RecoverableLoss | None = None  # workers were lost, nobody has failed, and all may begin again
    restart_plan: RestartPlan | None = None  # and do so, in this way

    @property
    def may_restart(self) -> bool:
        return self.recoverable_loss is not None

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the outcome again; only `failures` keep what was in error.json."""
        exits = tuple(dataclasses.replace(ended, error=None) for ended in self.exits)  # failures hold the errors
        restart_plan = None if self.restart_plan is None else self.restart_plan.to_json()
        data = dataclasses.asdict(dataclasses.replace(self, exits=exits, recoverable_loss=None, restart_plan=None))
        del data["recoverable_loss"], data["restart_plan"]
        return {**data, "broken": None, "again": restart_plan}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobOutcome:
        """Read it back; raises TypeError or KeyError where it is not one."""
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
    """The outcome when all workers have ended and nobody stopped the job. Where some were only taken away, the same
    command may well come to its end. `keeps_state`: it can begin again at once where workers were only lost."""
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
    """Whether this worker was lost by itself, and not because of another one."""
    return ended.is_loss and not ended.sent_by_us and not (ended.error or {}).get("echo")


def _was_taken(ended: WorkerExit) -> bool:
    """Whether a lost worker was killed from outside (by hand, a cluster, the kernel short of memory) or went with its
    host. Other signals, such as SIGSEGV and SIGABRT, are what a program does to itself."""
    return ended.signal == signal.SIGKILL or (ended.error or {}).get("kind") in LOST_KINDS


def _only_lost(failures: Sequence[Failure]) -> bool:
    """Whether some were lost, nobody failed by itself, and all processes are gone."""
    is_gone = all((ended.error or {}).get("kind") != STUCK for ended in failures)
    return is_gone and any(map(is_root_loss, failures)) and all(one.is_loss or one.sent_by_us for one in failures)


def left(finish: Finish, exits: Sequence[WorkerExit]) -> JobOutcome:
    """The outcome of a job whose workers have saved and left as they were told."""
    return JobOutcome(state="stopped", exit_code=finish.exit_code, reason=finish.reason, exits=tuple(exits))


def interrupted(signum: int, exits: Sequence[WorkerExit], *, by: str = "") -> JobOutcome:
    """The outcome of a job that was stopped by a signal to a supervisor: its workers' ends are no failures."""
    reason = f"stopped by {signal.Signals(signum).name}{by}"
    return JobOutcome(state="stopped", exit_code=128 + signum, reason=reason, exits=tuple(exits))


def lost(
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
    """The end of a worker of which nothing is known but what `message` says. `names_workers`: it says all there is."""
    error = {
        "kind": kind,
        "message": message,
        "traceback": "",
        "worker": worker,
        "host": host,
        "pid": pid,
        "step": None,  # nobody has heard
        "time": time.time(),
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
    """What a worker left in error.json, long texts cut; None where there is none, or where its writer was killed."""
    try:
        with open(worker_dir / "error.json", "rb") as file:
            error = json.loads(file.read(ERROR_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(error, dict):
        return None
    message, trace = str(error.get("message", "")), str(error.get("traceback", ""))
    if len(message) > TEXT_CHARS:
        error["message"] = message[:TEXT_CHARS] + " ..."
    if len(trace) > TEXT_CHARS:
        error["traceback"] = "...\n" + trace[-TEXT_CHARS:]  # its end says what was raised
    return error


class WorkerExits:
    """`workers` are those whose end is to be waited for."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.by_worker: dict[int, WorkerExit] = {}
        self.finish: Finish | None = None  # what everybody was told, once the run is to end
        self._expected = set(workers)
        self._accused: dict[int, Mapping[str, Any]] = {}  # workers that are ended because they hang, and what they did
        self._signum: int | None = None  # somebody stopped the job
        self._by = ""  # where, when it was not here

    # Whose end is waited for.

    def expect(self, workers: Iterable[int]) -> None:
        """These are started, perhaps anew."""
        for worker in workers:
            self._expected.add(worker)
            self.by_worker.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Its end is no news."""
        self._expected.discard(worker)

    def is_expected(self, worker: int) -> bool:
        """Whether this worker is one of the job, ended or not."""
        return worker in self._expected

    @property
    def missing(self) -> frozenset[int]:
        """Workers that have not ended."""
        return frozenset(self._expected - self.by_worker.keys())

    # What is known.

    def is_news(self, ended: WorkerExit) -> bool:
        return ended.worker in self.missing

    def accuse(self, worker: int, error: Mapping[str, Any]) -> None:
        """It is ended because it hangs: that is how it was lost."""
        self._accused[worker] = error

    def judged(self, ended: WorkerExit) -> WorkerExit:
        """The end of a worker, as what it was accused of."""
        if ended.worker not in self._accused:
            return ended
        error = self._accused[ended.worker]
        return dataclasses.replace(ended, exit_code=None, signal=None, error=error, sent_by_us=False)

    def note(self, ended: WorkerExit) -> None:
        """A worker has ended."""
        self.by_worker[ended.worker] = ended

    def note_hang(self, error: Mapping[str, Any]) -> None:
        """A worker is ended because it hangs, and that ends the job."""
        worker = int(error["worker"])
        ended = lost(worker, host=error["host"], pid=error["pid"], kind=error["kind"], message=error["message"])
        self.by_worker[worker] = dataclasses.replace(ended, error=error)

    def take_failures(self) -> list[WorkerExit]:
        """Those that have failed so far; they are to be noted anew."""
        failed = [ended for ended in self.by_worker.values() if ended.failed]
        for ended in failed:
            del self.by_worker[ended.worker]
        return failed

    @property
    def has_failures(self) -> bool:
        return any(ended.failed for ended in self.by_worker.values())

    def stop(self, signum: int, *, by: str = "", anyway: bool = False) -> None:
        """Somebody stopped the job. One that has failed already stays so, but `anyway`."""
        # Who stops a whole cgroup, say, sends workers the same signal.
        failures = [ended for ended in self.by_worker.values() if ended.failed]
        if anyway or all(ended.signal == signum or ended.exit_code == 128 + signum for ended in failures):
            self._signum, self._by = signum, by

    # What follows.

    @property
    def have_left(self) -> bool:
        """Whether all have saved and left, as they were told."""
        ended = self.by_worker.values()
        return self._signum is None and self.finish is not None and bool(ended) and all(one.has_left for one in ended)

    @property
    def stopped(self) -> JobOutcome | None:
        """How the job ends where somebody stopped it."""
        return None if self._signum is None else interrupted(self._signum, self._in_order, by=self._by)

    @property
    def outcome(self) -> JobOutcome:
        """How the job ends with these ends."""
        if self.finish is not None and self.have_left:
            return left(self.finish, self._in_order)
        return self.stopped or verdict(self._in_order)

    @property
    def _in_order(self) -> list[WorkerExit]:
        return [self.by_worker[worker] for worker in sorted(self.by_worker)]
