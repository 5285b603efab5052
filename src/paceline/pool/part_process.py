"""The processes of a node's parts of runs: how they are started, found, resized and asked to end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import environment
from paceline.launch.coordinator.control_socket import ask_to_end, send_command
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.plan.job import AUTO
from paceline.pool.node_files import NodeRecord, PartRecord, WantedPart
from paceline.pool.pool_run import PoolRun
from paceline.pool.run_control import start
from paceline.private_files import make_run_directory, write_private
from paceline.processes import is_same_process, process_started_s
from paceline.world_detection import CHOICE

__all__ = ["ask_part", "leads_here", "process_with", "share_out", "start_part"]

TOKENS = "tokens"
ANSWER_S = 0.3  # for a coordinator to answer: the agent, and a pool beside it, stand still meanwhile
PART = "PACELINE_POOL_PART"  # in the environment of a part: the mark by which it is found again


def start_part(pool: Path, run: PoolRun, wanted: WantedPart, *, mark: str, node: NodeRecord) -> subprocess.Popen[bytes]:
    """Start a part of a run on this node, or go on with the run from its newest checkpoint; raises OSError."""
    more, variables = list[str](), {PART: mark, CHOICE: "none"}
    if wanted.fixed is not None:
        more += ["--set", f"plan.layout.replicas={wanted.fixed}"]
    if run.growth is not None:  # micro-batches stay: a larger batch has more of them, and takes no more memory
        more += ["--set", f"plan.batch.size={wanted.batch or run.growth.least}"]
        more += ["--set", f"plan.batch.micro={run.growth.micro}"]
    if wanted.is_open or wanted.hosts > 1:
        more += ["--hosts", str(wanted.hosts), "--slots", str(wanted.replicas * run.workers_each), "--head", AUTO]
        more += ["--token-file", str(_token(pool, run))]
        variables[environment.ENGINE] = "pool"  # one console shows the whole run: the coordinator's
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(wanted.gpus or ())  # none, too, where they are hidden from the pool
    threads = max(1, node.cores // node.slots)
    replicas = wanted.workers // run.workers_each
    return start(pool, run, replicas=replicas, threads=threads, more=more, variables=variables)


def process_with(mark: str) -> int | None:
    """Return the process that was started with this mark, the oldest of those that have it; None where none has."""
    wanted, found = f"{PART}={mark}".encode(), list[tuple[float, int]]()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append((process_started_s(int(name)) or 0.0, int(name)))
    return min(found)[1] if found else None


def ask_part(part: PartRecord, *, run_dir: str = "") -> None:
    """Have a part finish the step in hand, save and leave; does not wait for it.

    With `run_dir` the whole run is to end on all nodes. Its coordinator alone is asked then, which tells the others.
    """
    record = _running(run_dir)
    if record is not None and (not record.is_here() or ask_to_end(record.pid, answer_s=ANSWER_S)):
        return
    if part.pid and is_same_process(part.pid, part.pid_started_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGTERM)


def leads_here(run_dir: str) -> bool:
    """Return whether the coordinator of the run that goes on in this directory is on this host."""
    record = _running(run_dir)
    return record is not None and record.is_here()


def share_out(run_dir: str, shares: Mapping[str, int], *, is_open: bool) -> str | None:
    """Have the run's coordinator give each host so many replicas. Returns "" when it agrees, else why not; None where
    it is on another host, or on its way there, or does not answer.
    """
    record = _running(run_dir)
    if record is None or not record.is_here():
        return None
    request: dict[str, Any] = {"op": "resize", "replicas": sum(shares.values())}
    if is_open:
        request["hosts"] = dict(shares)
    try:
        answer = send_command(record.pid, request, answer_s=ANSWER_S)
    except ConnectionError:
        return None
    return str(answer.get("error", ""))


def _running(run_dir: str) -> RunRecord | None:
    """Return the record of a run that goes on, as far as it says; None for any other one, and without a directory."""
    if not run_dir:
        return None
    with contextlib.suppress(ValueError):
        record = RunRecord.load(run_dir)
        return record if record.state == RUNNING else None
    return None


def _token(pool: Path, run: PoolRun) -> Path:
    """The file by whose content the parts of a run know each other; made for the first of them."""
    make_run_directory(pool / TOKENS)
    path = (pool / TOKENS / run.name).absolute()
    partial = path.with_name(f".{run.name}.{secrets.token_hex(8)}")
    write_private(partial, secrets.token_hex(32).encode())
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(partial)  # unlike a rename it keeps the one that is there
    partial.unlink(missing_ok=True)
    return path
