"""Pretended workers, for tests of who watches a run: they write what real ones would, and nobody trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.events import EventLog, Regrouped, StepDone, WorkerLost, WorkerStarted
from paceline.monitor.records.run_record import RunRecord
from paceline.plan.job import Job

__all__ = ["JOB", "SECONDS", "Workers", "lose"]

SECONDS = {"data": 0.001, "compute": 0.086, "communication": 0.008, "optimizer": 0.003, "total": 0.1}
JOB = Job(tensorboard=False)


class Workers:
    """Pretended workers that write what real ones would."""

    def __init__(self, run: Path, count: int = 2) -> None:
        self.run, self.count = run, count
        self.attempt = run / f"attempt_{RunRecord.begin_attempt(run, job={}, workers=count).attempt}"
        self.directories = [self.attempt / f"worker_{worker}" for worker in range(count)]
        for directory in self.directories:
            directory.mkdir(parents=True)
        self.logs = [EventLog(path / "events.jsonl", worker=worker) for worker, path in enumerate(self.directories)]

    def start(self, *, resumed_from_step: int = 0, plan: str = "replicas=2") -> None:
        for worker in range(self.count):
            self.start_one(worker, resumed_from_step=resumed_from_step, plan=plan)

    def start_one(self, worker: int, *, host: str = "a", resumed_from_step: int = 0, plan: str = "replicas=2") -> None:
        about: dict[str, Any] = {"rank": worker, "pid": 10 + worker, "startup_s": 1.9, "plan": plan}
        about |= {"host": host, "resumed_from_step": resumed_from_step}
        self.logs[worker].emit(WorkerStarted(**about, workers=self.count, device="cpu"))

    def step(self, number: int, **fields: Any) -> None:
        values: dict[str, Any] = {"epoch": 0, "num_samples": 8, "loss": 10 / number, "metrics": {}, "seconds": SECONDS}
        self.emit(StepDone(step=number, **{**values, **fields}))

    def emit(self, event: Any) -> None:
        for log in self.logs:
            log.emit(event)

    def add(self) -> int:
        """One more worker's directory and events; returns its rank."""
        directory = self.attempt / f"worker_{self.count}"
        directory.mkdir()
        self.directories.append(directory)
        self.logs.append(EventLog(directory / "events.jsonl", worker=self.count))
        self.count += 1
        return self.count - 1

    def write(self, worker: int, stream: str, text: str) -> None:
        with open(self.directories[worker] / f"{stream}.log", "a") as file:
            file.write(text)

    def close(self) -> None:
        for log in self.logs:
            log.close()


def lose(supervisor: EventLog, rank: int, step: int, *, members: list[int], steps_lost: int = 0) -> None:
    reason = f"worker {rank} (pid 7) killed by signal 9"
    supervisor.emit(WorkerLost(rank=rank, host="a", step=step, reason=reason))
    about: dict[str, Any] = {"causes": [reason], "members": members, "step": step, "holds": len(members) < 1}
    supervisor.emit(Regrouped(**about, detected_s=0.01, regrouped_s=0.03, steps_lost=steps_lost))
