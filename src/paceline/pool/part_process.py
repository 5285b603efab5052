"""The processes of a node's parts of runs: how they are started, found, resized and asked to end."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from paceline import environment
from paceline.launch.coordinator.control_socket import ask_to_end, send_command
from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.plan.job import AUTO
from paceline.pool.node_files import NodeRecord, PartRecord, WantedPart
from paceline.pool.pool_run import PoolRun
from paceline.pool.run_control import resize, start
from paceline.private_files import make_run_directory, write_private
from paceline.processes import is_same_process, process_started_s
from paceline.world_detection import CHOICE

__all__ = ["ask_part", "process_with", "share_out", "start_part", "uses_gpus"]

TOKENS = "tokens"
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
    if wanted.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(wanted.gpus)
    threads = max(1, node.cores // node.slots)
    replicas = wanted.workers // run.workers_each
    return start(pool, run, replicas=replicas, threads=threads, more=more, variables=variables)


def uses_gpus(run: PoolRun) -> bool:
    """Return whether a run takes GPUs where a node has some: all but those whose command says --device cpu."""
    words = run.command[: run.command.index("--") if "--" in run.command else None]
    said = [word.partition("=")[2] for word in words if word.startswith("--device=")]
    said += [after for word, after in itertools.pairwise(words) if word == "--device"]
    return "cpu" not in said


def process_with(mark: str) -> int | None:
    """Return the process that was started with this mark, the oldest of those that have it; None where none has."""
    wanted, found = f"{PART}={mark}".encode(), list[tuple[float, int]]()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append((process_started_s(int(name)) or 0.0, int(name)))
    return min(found)[1] if found else None


def ask_part(part: PartRecord, run: PoolRun | None = None) -> None:
    """Have a part finish the step in hand, save and leave; does not wait for it.

    With `run` the whole run is to end on all nodes. Its coordinator alone is asked then, which tells the others.
    """
    record = None if run is None else _running(run)
    if record is not None:
        if record.is_here():
            ask_to_end(record.pid)
        return
    if part.pid and is_same_process(part.pid, part.pid_started_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGTERM)


def share_out(run: PoolRun, shares: Mapping[str, int], *, is_open: bool) -> str | None:
    """Have the run's coordinator give each host so many replicas. Returns "" when it agrees, else why not; None where
    it is on another host, or on its way there.
    """
    record = _running(run)
    if record is None or not record.is_here():
        return None
    if not is_open:
        return resize(run, sum(shares.values()))
    try:
        answer = send_command(record.pid, {"op": "resize", "replicas": sum(shares.values()), "hosts": dict(shares)})
    except ConnectionError:
        return None
    return str(answer.get("error", ""))


def _running(run: PoolRun) -> RunRecord | None:
    with contextlib.suppress(ValueError):
        record = RunRecord.load(run.run_dir)
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
