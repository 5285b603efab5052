"""Folders of pools and sweeps as commands leave them, without any process: for tests of pages, and for pictures."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.processes import process_started_s, this_host

__all__ = ["SUBMITTED", "decide", "own_process", "queue", "searched", "write_pool", "write_sweep"]

SUBMITTED = 1_795_000_000.0


def own_process() -> dict[str, Any]:
    """This process, as the records of pools and sweeps name theirs."""
    return {"host": this_host(), "pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0}


def write_pool(pool: Path, runs: Mapping[str, Mapping[str, Any]], *, slots: int = 4, **fields: Any) -> Path:
    """Write `pool.json`: of this process, with these values of runs."""
    pool.mkdir(parents=True, exist_ok=True)
    record = own_process() | {"slots": slots, "runs": {name: dict(entry) for name, entry in runs.items()}} | fields
    temporary = pool / ".pool.json.new"
    temporary.write_text(json.dumps(record, indent=1))
    temporary.replace(pool / "pool.json")
    return pool


def queue(
    pool: Path, run_dir: Path, *, least: int = 1, most: int = 1, submitted: float = SUBMITTED, **fields: Any
) -> None:
    """Queue a run: a file as `paceline run --pool` writes it."""
    (pool / "queue").mkdir(parents=True, exist_ok=True)
    run = {
        "name": run_dir.name, "command": ["train.py"], "folder": "/", "environment": {"SECRET_TOKEN": "s3cret"},
        "run_dir": str(run_dir.absolute()), "script": "train.py", "least": least, "most": most, "workers_each": 1,
        "submitted": submitted, "priority": 1.0, "deadline": None,
    }  # fmt: skip
    (pool / "queue" / f"{run_dir.name}.json").write_text(json.dumps(run | fields))


def decide(pool: Path, rows: Sequence[tuple[float, str, int, int, str]]) -> None:
    """Append decisions: time, run, replicas before and after, and why."""
    pool.mkdir(parents=True, exist_ok=True)
    with (pool / "decisions.jsonl").open("a", encoding="utf-8") as file:
        for time, run, before, after, why in rows:
            file.write(json.dumps({"time": time, "run": run, "before": before, "after": after, "why": why}) + "\n")


def write_sweep(folder: Path, trials: Sequence[Mapping[str, Any]], **fields: Any) -> Path:
    """Write `sweep.json`: of this process, with these trials (number, parameters and what else differs)."""
    folder.mkdir(parents=True, exist_ok=True)
    study = own_process() | {
        "name": folder.name, "study": str(folder / "study.toml"), "objective": "eval/accuracy", "direction": "maximize",
        "state": "running", "started": SUBMITTED, "updated": SUBMITTED, "pool": str(folder / "pool"), "wanted": 40,
        "best": None,
    }  # fmt: skip
    rows = [
        {"state": "finished", "value": None, "step": 100, "last_step": 100, "replicas": 0, "why": ""}
        | {"run_dir": f"trials/trial-{trial['number']:04}"} | dict(trial)
        for trial in trials
    ]  # fmt: skip
    temporary = folder / ".sweep.json.new"
    temporary.write_text(json.dumps(study | fields | {"trials": rows}))
    temporary.replace(folder / "sweep.json")
    return folder


def searched(num: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Trials of a search over a learning rate, a width, dropout and an optimizer, which gets better as it goes on."""
    source, found = random.Random(seed), list[dict[str, Any]]()
    for number in range(num):
        focus = number / num  # later trials lie closer to the best
        rate = 10 ** source.gauss(-2.6, 1.0 - 0.6 * focus)
        width = source.choice([64, 128, 256, 512])
        optimizer = source.choices(["adamw", "sgd", "lion"], [1 + 3 * focus, 1, 1])[0]
        dropout = round(source.uniform(0, 0.5), 3)
        off = abs(math.log10(rate) + 2.6) + 0.15 * abs(math.log2(width / 256)) + 0.5 * dropout**2
        off += {"adamw": 0.0, "lion": 0.08, "sgd": 0.25}[optimizer]
        value = round(0.982 - 0.11 * off + source.gauss(0, 0.004), 4)
        is_pruned = value < 0.9 and number > 5
        parameters = {"lr": float(f"{rate:.3g}"), "width": width, "optimizer": optimizer, "dropout": dropout}
        found.append(
            {"number": number, "parameters": parameters, "value": value, "state": "pruned" if is_pruned else "finished"}
            | ({"step": 20 + number % 40, "why": "below the median of the others at this step"} if is_pruned else {})
        )
    return found
