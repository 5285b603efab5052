"""Real workers for tests: forked from the test process, which has paid for `import torch`, joined by gloo."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.plan import Plan
from paceline.plan.job import Assignment, Job
from paceline.worker.session import run_worker

LIMIT_S = 100.0  # a worker that stands still is found by this, and tells where; its group's own limit is longer
STACKS_S = 2.0  # how long a worker that is late may take to write where it is


class WorkersFailed(AssertionError):
    """Some workers did not return; `errors` maps ranks to their tracebacks."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"worker {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


class World:
    """Runs functions on n workers in one run directory; each call is one attempt."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        self._scratch = directory
        self.attempt = 0

    def __call__(
        self,
        function: Callable[[Any], Any],
        workers: int,
        plan: Plan | None = None,
        *,
        limit_s: float = LIMIT_S,
        **job: Any,
    ) -> list[Any]:
        """Return what `function(worker)` returned on each worker; raises WorkersFailed."""
        self.attempt += 1
        exchange = self._scratch / f"exchange_{self.attempt}"
        exchange.mkdir()
        children = {
            self._fork(function, rank, workers, plan or Plan(), Job(workers=workers, **job), exchange): rank
            for rank in range(workers)
        }
        statuses = _reap(children, limit_s)
        # First those that were killed: the others have waited for them, and say only that.
        statuses = dict(sorted(statuses.items(), key=lambda one: (not os.WIFSIGNALED(one[1]), one[0])))
        errors = {rank: _told(exchange, rank, status) for rank, status in statuses.items() if status != 0}
        if errors:
            raise WorkersFailed(errors)
        return [torch.load(exchange / f"value_{rank}", weights_only=False) for rank in range(workers)]

    def one_process(self, function: Callable[[Any], Any], plan: Plan | None = None, **job: Any) -> Any:
        """The oracle: the same on a world of one, in a directory of its own."""
        alone = World(self._scratch / f"alone_{self.attempt}_{time.monotonic_ns()}")
        alone._scratch.mkdir()
        return alone(function, 1, plan, **job)[0]

    def worker_dir(self, rank: int) -> Path:
        return self.run_dir / f"attempt_{self.attempt}" / f"worker_{rank}"

    def _fork(
        self, function: Callable[[Any], Any], rank: int, workers: int, plan: Plan, job: Job, exchange: Path
    ) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.alarm(0)
            stacks = (exchange / f"stacks_{rank}").open("w")
            faulthandler.register(signal.SIGQUIT, file=stacks)
            store = dist.FileStore(str(exchange / "store"), workers)
            value = run_worker(function, self._assignment(rank, workers, job), plan=plan, store=store)
            torch.save(value, exchange / f"value_{rank}")
            status = 0
        except BaseException:  # the child's boundary: the parent raises it
            (exchange / f"error_{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(status)

    def _assignment(self, rank: int, workers: int, job: Job) -> Assignment:
        return Assignment(
            rank=rank,
            workers=workers,
            local_rank=rank,
            local_workers=workers,
            host="testhost",
            host_index=0,
            hosts=1,
            address="127.0.0.1",
            run_dir=str(self.run_dir),
            attempt=self.attempt,
            worker_dir=str(self.run_dir / f"attempt_{self.attempt}" / f"worker_{rank}"),
            channel_fd=-1,
            command_started=time.time(),
            job=job,
        )


class Apart(World):
    """Workers that take themselves for those of several hosts: worker k is on the k-th."""

    def __init__(self, directory: Path, hosts: tuple[int, ...]) -> None:
        super().__init__(directory)
        self._hosts = hosts

    def _assignment(self, rank: int, workers: int, job: Job) -> Assignment:
        alone = super()._assignment(rank, workers, job)
        host = self._hosts[rank] if workers > 1 else 0
        return dataclasses.replace(alone, host=f"host{host}", host_index=host, hosts=len(set(self._hosts[:workers])))


def _told(exchange: Path, rank: int, status: int) -> str:
    """What is known of a worker that has failed: its error, or where it was when its time was up."""
    error, stacks = exchange / f"error_{rank}", exchange / f"stacks_{rank}"
    if error.exists():
        return error.read_text()
    return f"status {status}\n{stacks.read_text() if stacks.exists() else ''}"


def _reap(children: dict[int, int], limit_s: float) -> dict[int, int]:
    """rank -> wait status; a worker that is left after the limit writes its stacks and is killed."""
    statuses: dict[int, int] = {}

    def wait(limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while len(statuses) < len(children) and time.monotonic() < deadline:
            for pid, rank in children.items():
                if rank not in statuses:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        statuses[rank] = status
            time.sleep(0.005)

    try:
        wait(limit_s)
        late = [pid for pid, rank in children.items() if rank not in statuses]
        for pid in late:
            os.kill(pid, signal.SIGQUIT)
        if late:
            wait(STACKS_S)
    finally:
        for pid, rank in children.items():
            if rank not in statuses:
                os.kill(pid, signal.SIGKILL)
                statuses[rank] = os.waitpid(pid, 0)[1]
    return statuses
