"""Run directories as runs leave them, without any training: for tests of pages, and for their pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.logs.metric_rows import NEWEST, NUM_ROWS

__all__ = ["SyntheticRun", "long_run", "many_runs"]

BEGAN = 1_795_000_000.0
SECONDS = {"data": 0.002, "compute": 0.31, "communication": 0.04, "optimizer": 0.03, "total": 0.4}


@dataclasses.dataclass(kw_only=True)
class SyntheticRun:
    """A run of some workers with one attempt; `write` makes its directory."""

    path: Path
    steps: int = 300
    last_step: int | None = None  # at which it was to end; None: at `steps`
    workers: int = 2
    state: str = "finished"
    plan: str = "replicas=2+batch(size=64)"
    program: str = "train.py"
    args: tuple[str, ...] = ()
    began: float = BEGAN
    seed: int = 0
    level: float = 0.4  # the loss in the end
    evaluate_every: int = 0
    lose_at: int = 0  # a worker is lost at this step, and comes back 20 steps later; 0: never
    error: str = ""  # why it failed
    pid: int = 0
    pid_started_s: float = 0.0
    host: str = "elsewhere"
    job: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def attempt(self) -> Path:
        return self.path / "attempt_1"

    @property
    def ended(self) -> float:
        return self.began + 4 + self.steps * SECONDS["total"]

    def write(self) -> Path:
        for worker in range(self.workers):
            (self.attempt / f"worker_{worker}").mkdir(parents=True, exist_ok=True)
        is_over = self.state != "running"
        end = {"state": self.state, "ended": self.ended if is_over else None, "exit_code": 0 if is_over else None}
        end["exit_code"] = 1 if self.state == "failed" else end["exit_code"]
        job = {"program": self.program, "args": list(self.args), "hosts": 1, "max_steps": self.last_step or self.steps}
        record = {
            **end,
            "job": job | dict(self.job),
            "plan": self.plan,
            "workers": self.workers,
            "attempts": [{"attempt": 1, "started": self.began, **end}],
            "host": self.host,
            "pid": self.pid,
            "pid_started_s": self.pid_started_s,
            "started": self.began,
        }
        (self.path / "run.json").write_text(json.dumps(record))
        self._write_lines(self.path / "metrics.jsonl", self.rows(1, self.steps))
        self._write_lines(self.attempt / "events.jsonl", self._supervisor_events())
        for worker in range(self.workers):
            directory = self.attempt / f"worker_{worker}"
            self._write_lines(directory / "events.jsonl", self._worker_events(worker))
            (directory / "stdout.log").write_text("".join(f"epoch {k}: loss {5 / k:.3f}\n" for k in range(1, 40)))
            (directory / "stderr.log").write_text("UserWarning: the loader has two workers\n")
        return self.path

    def rows(self, first: int, last: int) -> Iterator[dict[str, Any]]:
        """Rows of `metrics.jsonl` for these steps."""
        noise = random.Random(self.seed * 1_000_003 + first)
        for step in range(first, last + 1):
            fallen = self.level + 4.0 * math.exp(-5 * step / max(1, self.last_step or self.steps))
            spike = 3.0 if step % 997 == 500 else 0.0
            yield {
                "step": step,
                "attempt": 1,
                "epoch": 0,
                "time": round(self.began + 4 + step * SECONDS["total"], 3),
                "num_samples": 64,
                "loss": round(fallen * (1 + 0.05 * noise.gauss(0, 1)) + spike, 6),
                "samples_per_s": round(160 * (1 + 0.03 * noise.gauss(0, 1)), 3),
                "skipped": False,
                **({"noise_scale": round(90 + step / 10, 3)} if step > 20 else {}),
                "seconds": SECONDS,
                "lr": 3e-4 * min(1.0, step / 50) * (1 + math.cos(math.pi * step / (self.last_step or self.steps))) / 2,
                "grad_norm": round(1.2 + 0.3 * noise.random() + (2 if spike else 0), 5),
                "accuracy": round(1 - 0.9 * math.exp(-4 * step / (self.last_step or self.steps)), 5),
            }

    def append(self, first: int, last: int) -> None:
        """More steps, as a run that goes on writes them."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows(first, last))

    def _event(self, kind: str, at_s: float, worker: int | None, **fields: Any) -> dict[str, Any]:
        return {"event": kind, "time": self.began + at_s, "worker": worker, **fields}

    def _supervisor_events(self) -> Iterator[dict[str, Any]]:
        about = {"run_dir": str(self.path), "attempt": 1, "workers": self.workers, "hosts": 1, "launcher": "local"}
        yield self._event("RunStarted", 0, None, **about, program=self.program)
        if self.lose_at:
            when, rank = 4 + self.lose_at * SECONDS["total"], self.workers - 1
            reason = f"worker {rank} (pid 4711) killed by signal 9"
            lost = {"rank": rank, "host": self.host, "step": self.lose_at}
            yield self._event("WorkerLost", when, None, **lost, reason=reason)
            gone_on = {"causes": [reason], "members": [*range(rank)], "step": self.lose_at, "steps_lost": 0}
            yield self._event("Regrouped", when + 0.1, None, **gone_on, detected_s=0.01, regrouped_s=0.03, holds=False)
            yield self._event("WorkerJoined", when + 8, None, rank=rank, step=self.lose_at + 20, after_s=7.9)
        if self.error:
            failed = {"rank": 0, "host": self.host, "step": self.steps, "reason": self.error}
            yield self._event("WorkerFailed", self.ended - self.began, None, **failed)

    def _worker_events(self, worker: int) -> Iterator[dict[str, Any]]:
        about = {"rank": worker, "workers": self.workers, "host": self.host, "pid": 100 + worker, "device": "cuda:0"}
        began = {**about, "startup_s": 3.2, "plan": self.plan, "resumed_from_step": 0}
        yield self._event("WorkerStarted", 3.2, worker, **began)
        opened = {"name": "train", "num_samples": 64_000, "epochs": 1, "last_step": self.last_step or self.steps}
        yield self._event("StreamOpened", 3.3, worker, **opened)
        if self.lose_at and worker == self.workers - 1:
            when = 4 + self.lose_at * SECONDS["total"] + 7
            yield self._event("WorkerStarted", when, worker, **{**began, "startup_s": 2.0, "pid": 4999})
        for step in range(1, self.steps + 1):
            done = {"epoch": 0, "num_samples": 64, "loss": 1.0, "metrics": {}, "seconds": SECONDS}
            yield self._event("StepDone", 4 + step * SECONDS["total"], worker, step=step, **done)
            if self.evaluate_every and step % self.evaluate_every == 0:
                held_out = {"accuracy": 1 - 0.8 * math.exp(-4 * step / self.steps), "perplexity": 1 + 40 / step}
                when = 4 + step * SECONDS["total"] + 0.1
                fields = {"num_samples": 5000, "metrics": held_out, "duration_s": 0.2}
                yield self._event("Evaluated", when, worker, step=step, **fields)
        if self.state == "finished":
            finished = {"rank": worker, "step": self.steps, "peak_memory_bytes": 3 << 30, "state_bytes": 1 << 30}
            yield self._event("WorkerFinished", self.ended - self.began, worker, **finished)

    def _write_lines(self, path: Path, lines: Iterator[dict[str, Any]]) -> None:
        with open(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def long_run(path: Path, steps: int, *, spike_at: int = 0) -> SyntheticRun:
    """A run whose old rows were thinned, as those of a run of so many steps are; one step has a loss of 99."""
    run = SyntheticRun(path=path, steps=1, last_step=steps, workers=2)
    run.write()
    newest = next(run.rows(1, 1))
    with open(path / "metrics.jsonl", "w") as file:
        for last in range(NUM_ROWS, steps - NEWEST + 1, NUM_ROWS):
            loss = 0.4 + 4 * math.exp(-5 * last / steps)
            most = 99.0 if last - NUM_ROWS < spike_at <= last else loss * 1.2
            spread = {"mean": loss, "least": loss * 0.9, "most": most, "first": loss, "last": loss, "num": NUM_ROWS}
            speeds = {**spread, "mean": 160.0, "least": 150.0, "most": 170.0}
            counts = {"num": NUM_ROWS, "num_skipped": 0, "num_broken": 0, "num_samples": 6400, "timed_samples": 6400}
            merged = {"steps": [[last - NUM_ROWS + 1, last]], **counts, "loss": spread, "samples_per_s": speeds}
            merged |= {"took_s": 40.0, "since": BEGAN + 4 + (last - NUM_ROWS) * 0.4, "seconds": SECONDS}
            row = newest | {"step": last, "time": BEGAN + 4 + last * 0.4, "loss": loss, "merged": merged}
            file.write(json.dumps(row) + "\n")
    run.append(max(1, steps - NEWEST + 1), steps)
    return run


def many_runs(folder: Path, num: int, *, steps: int = 60) -> None:
    """So many small runs of different states."""
    states = ("finished", "finished", "stopped", "failed", "running")
    for place in range(num):
        state = states[place % len(states)]
        SyntheticRun(
            path=folder / f"sweep-{place // 100}/run-{place:04d}",
            steps=steps,
            state=state,
            began=BEGAN + 60 * place,
            seed=place,
            error="worker 0 (pid 7): ValueError: no such file" if state == "failed" else "",
        ).write()
