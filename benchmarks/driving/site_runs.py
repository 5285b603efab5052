"""One way to agree on one network of far sites: the job is started on each site, and its diaries are read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from driving.courses import DDP, Course, Task
from paceline.testing.network_namespaces import NamespaceHost
from paceline.testing.sites import DEVICE

__all__ = ["Failed", "course"]

PROGRAMS = Path(__file__).parents[1] / "programs"
PORT = 29500
START_S = 120.0  # until the first step
END_S = 60.0  # from the last step to the end
LOOK_S = 0.1


class Failed(Exception):
    """A job that did not begin, or broke; the text says why."""


def course(hosts: Sequence[NamespaceHost], plan: str, task: Task, *, limit_s: float) -> Course:
    """Train on these sites until the target is met or the limit is over, counted from the first step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "diary"
        words = json.dumps(dataclasses.asdict(task) | {"out": str(out)})
        with _started(hosts, plan, words, Path(folder)) as programs:
            _wait(programs, out.with_name("diary.0"), limit_s=limit_s)
        diaries = [_rows(out.with_name(f"diary.{number}")) for number in range(len(hosts))]
        if any(not rows for rows in diaries):
            raise Failed(_last_words(Path(folder), hosts))
    return _course(diaries)


@contextlib.contextmanager
def _started(
    hosts: Sequence[NamespaceHost], plan: str, work: str, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    many = str(len(hosts))
    with contextlib.ExitStack() as stack:
        programs: list[subprocess.Popen[bytes]] = []
        for number, host in enumerate(hosts):
            if plan == DDP:
                words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", many, "--nproc-per-node", "1"]
                words += ["--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", str(PORT)]
                words += [str(PROGRAMS / "sites_ddp.py"), work]
            else:
                words = [sys.executable, "-m", "paceline", "run", str(PROGRAMS / "sites_paceline.py")]
                words += ["--workers", many, "--hosts", many, "--head", f"{hosts[0].address}:{PORT}"]
                words += ["--token-file", str(token), "--run-dir", str(folder / f"run_{number}")]
                words += ["--plan", plan, "--", work]
            said = stack.enter_context(open(folder / f"said_{host.name}", "wb"))
            options: dict[str, Any] = {"env": variables, "stdout": said, "stderr": said, "start_new_session": True}
            programs.append(subprocess.Popen[bytes]([*host.prefix, *words], **options))
            stack.callback(_end, programs[-1])
        yield programs


def _wait(programs: Sequence[subprocess.Popen[bytes]], diary: Path, *, limit_s: float) -> None:
    """Until all have ended, or until so long after the first step."""
    deadline, has_begun = time.monotonic() + START_S, False
    while any(program.poll() is None for program in programs) and time.monotonic() < deadline:
        if not has_begun and diary.exists() and diary.stat().st_size:
            deadline, has_begun = time.monotonic() + limit_s, True
        time.sleep(LOOK_S)  # a file that grows wakes no process


def _end(program: subprocess.Popen[bytes]) -> None:
    """End a job and all that it has started: nothing of it is needed any more."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(program.pid).children(recursive=True)  # torchrun's workers have sessions of their own
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    program.wait(timeout=END_S)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]


def _course(diaries: Sequence[Sequence[dict[str, Any]]]) -> Course:
    """What all workers have noted: of each step that all have ended."""
    ended = [{row["step"]: row for row in rows if "loss" in row} for rows in diaries]
    steps = sorted(set(ended[0]).intersection(*ended[1:]))
    return Course(
        losses={step: statistics.fmean(rows[step]["loss"] for rows in ended) for step in steps},
        seconds={step: max(rows[step]["seconds"] for rows in ended) for step in steps},
        num_bytes={step: statistics.fmean(rows[step]["num_bytes"] for rows in ended) for step in steps},
        held_out={row["step"]: row["held_out"] for row in diaries[0] if "held_out" in row and row["step"] in steps},
    )


def _last_words(folder: Path, hosts: Sequence[NamespaceHost]) -> str:
    return "\n".join((folder / f"said_{host.name}").read_text(errors="replace")[-1500:] for host in hosts[:2])
