"""What `paceline run --pool` shows until its run ends: where this stands in the pool, and what its command prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.monitor.records.run_files import GrowingFile
from paceline.pool.nodes import SILENT
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import NodeEntry, PoolRecord, RunEntry
from paceline.pool.run_control import console_of
from paceline.pool.shares import shares_text

__all__ = ["follow", "pool_lines"]

LOOK_S = 0.3
STOPPED = 130
FAILED = 1


def follow(pool: Path, run: PoolRun, *, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """Follow a run to its end; returns its exit status. `say` gets what the pool does with it, `show` what it prints.

    Ctrl-C ends only this: the run stays in the pool.
    """
    console, known = GrowingFile(console_of(pool, run)), PoolRecord.file(pool)
    told = ""
    try:
        while True:
            record = known.read()
            entry = record.runs.get(run.name)
            now = _state_text(pool, record, entry)
            if now != told:
                say(now)
                told = now
            for line in console.poll(None):
                show(line)
            if entry is not None and entry.is_over:
                for line in console.poll(None):
                    show(line)
                return _exit_status(entry)
            if entry is None and not (pool / "queue" / f"{run.name}.json").exists():
                say(f"{run.name} was taken out of the pool")
                return STOPPED
            time.sleep(LOOK_S)
    finally:
        console.close()


def _state_text(pool: Path, record: PoolRecord, entry: RunEntry | None) -> str:
    if entry is not None and entry.is_over:
        return f"{entry.phase} at step {entry.step}"
    if not record.is_alive(pool):
        return f"the pool does not run: start it with `paceline pool {pool}`"
    if entry is None or entry.phase == "waiting":
        return "waits for devices" if entry is None or not entry.step else f"waits for devices, at step {entry.step}"
    if entry.moves:
        return f"saves, and goes on with another batch: {entry.why}"
    if entry.phase == "leaving":
        return "saves and gives its devices to others"
    batch = f" and batches of {entry.batch:,}" if entry.batch else ""
    return f"has {entry.replicas} {'replica' if entry.replicas == 1 else 'replicas'}{batch}" + (
        f": {entry.why}" if entry.why else ""
    )


def _exit_status(entry: RunEntry) -> int:
    if entry.phase == "finished":
        return 0
    return entry.exit_code if entry.exit_code is not None and entry.exit_code > 0 else FAILED


def pool_lines(pool: Path, record: PoolRecord, queued: dict[str, PoolRun]) -> list[str]:
    """The pool as a table: its devices, and each run with state, replicas, progress and the last decision."""
    entries = {name: record.runs.get(name, RunEntry()) for name in queued}
    held = sum(entry.replicas * queued[name].workers_each for name, entry in entries.items())
    state = f"process {record.pid} on {record.host}" if record.is_alive(pool) else "does not run"
    lines = [f"pool     {pool}: {state}, {held} of {record.slots} devices in use"]
    if len(record.nodes) > 1:
        lines += [f"  node {name}: {_node_text(node)}" for name, node in sorted(record.nodes.items())]
    if not queued:
        return [*lines, f"no runs: queue one with `paceline run --pool {pool} SCRIPT`"]
    width = max(len(name) for name in queued)
    lines.append(f"{'run':{width}}  {'state':8}  {'replicas':>8}  {'step':>15}  why")
    for name, entry in entries.items():
        run = queued[name]
        replicas = f"{entry.replicas} of {run.most}"
        step = f"{entry.step:,}" + (f" of {entry.last_step:,}" if entry.last_step else "")
        on = f"[{shares_text(entry.shares)}] " if len(record.nodes) > 1 and entry.shares else ""
        lines.append(f"{name:{width}}  {entry.phase:8}  {replicas:>8}  {step:>15}  {on}{entry.why}".rstrip())
    return lines


def _node_text(node: NodeEntry) -> str:
    """Say what a node offers: "2 of 4 GPUs in use"."""
    what = "GPUs" if node.gpus else "devices"
    if node.state == SILENT:
        return f"does not answer; {node.used} of its {what} in use, as far as runs say"
    return f"{node.used} of {node.slots} {what} in use"
