"""Ledgers of pretended runs, and edits of them, for the tests of the audit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.monitor.audit.audit import AuditResult

__all__ = ["BATCH", "MICRO", "SAMPLES", "Line", "edit", "ledger", "states", "steps", "write_attempt"]


Line = dict[str, Any]


SAMPLES, BATCH, MICRO = 50, 8, 2  # 7 steps an epoch, the last with 2 samples


def steps(
    *,
    workers: int,
    first: int = 1,
    last: int,
    samples: int = SAMPLES,
    batch: int = BATCH,
    micro: int = MICRO,
    drop: bool = False,
) -> Iterator[tuple[int, int, Line]]:
    """Yield (worker, step, line) of a correct run: each step's micro-batches are given to the workers in turn."""
    per_epoch = samples // batch if drop else -(-samples // batch)
    for step in range(first, last + 1):
        epoch, place = divmod(step - 1, per_epoch)
        start, stop = place * batch, min((place + 1) * batch, samples)
        micros = [[a, min(a + micro, stop)] for a in range(start, stop, micro)]
        for worker in range(workers):
            line = {
                "step": step,
                "stream": "train",
                "epoch": epoch,
                "ranges": micros[worker::workers],
                "skipped": False,
            }
            yield worker, step, line


def write_attempt(
    run: Path, attempt: int, lines: Iterator[tuple[int, int, Line]], *, workers: int, from_step: int = 0, **about: Any
) -> None:
    opening = {"stream": "train", "samples": SAMPLES, "batch": BATCH, "micro": MICRO, "seed": 3, "shuffle": True}
    opening = {**opening, "drop_last": False, **about}
    head = {"attempt": attempt, "from_step": from_step, "of_attempt": attempt - 1 or None}
    texts = {k: [head, opening] for k in range(workers)}
    for worker, _, line in lines:
        texts[worker].append(line)
    for worker, told in texts.items():
        directory = run / f"attempt_{attempt}" / f"worker_{worker}"
        directory.mkdir(parents=True)
        (directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def ledger(run: Path, attempt: int, worker: int) -> Path:
    return run / f"attempt_{attempt}" / f"worker_{worker}" / "ledger.jsonl"


def edit(path: Path, step: int, **changes: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [{**line, **changes} if line.get("step") == step else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def states(result: AuditResult) -> list[str]:
    return [epoch.state for epoch in result.epochs]
