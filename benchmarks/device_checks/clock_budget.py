"""Runs checks one after the other within a limit, each in a process group of its own with a limit of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from device_checks.rows import Row, append, read

__all__ = ["LEAST_S", "run_checks"]

LEAST_S = 15.0  # with less than that left a check is not begun
END_S = 5.0  # for what a killed check leaves, and for the tables
ROOT = Path(__file__).resolve().parents[2]


def run_checks(
    names: Sequence[str],
    *,
    limits_s: Mapping[str, float],
    device: str,
    folder: Path,
    deadline: float,
    after_each: Callable[[list[Row]], None],
) -> list[Row]:
    """Return the rows of all checks. `deadline` is in seconds of `time.monotonic`; `after_each` keeps what is there."""
    rows_file = folder / "rows.jsonl"
    for old in (rows_file, folder / "log.txt"):
        old.unlink(missing_ok=True)
    for name in names:
        command = f"make accelerator ARGS='--only {name}'"
        left_s = deadline - END_S - time.monotonic()
        if left_s < LEAST_S:
            append(
                rows_file, Row(check=name, asked="to run", measured="out of time", verdict="not run", command=command)
            )
        else:
            limit_s = min(limits_s[name], left_s)
            why = _run(name, device=device, folder=folder, rows=rows_file, command=command, limit_s=limit_s)
            if why is not None:
                append(rows_file, Row(check=name, asked="to end well", measured=why, verdict="failed", command=command))
        after_each(read(rows_file))
    return read(rows_file)


def _run(name: str, *, device: str, folder: Path, rows: Path, command: str, limit_s: float) -> str | None:
    """Run a check; returns why it did not end well. Nothing that it has started is left."""
    places = [ROOT / "src", ROOT / "benchmarks", ROOT / "tests" / "support", ROOT / "examples"]
    paths = [*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    scratch = folder / "scratch" / name
    scratch.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    words = [sys.executable, "-m", "device_checks.one", name, device, str(scratch), str(rows), command]
    with log.open("a") as output:
        output.write(f"\n== {name}\n")
        output.flush()
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started: list[psutil.Process] = []
        deadline = time.monotonic() + limit_s
        try:
            while True:
                started = _with_descendants(process.pid, started)
                try:
                    code = process.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    if time.monotonic() > deadline:
                        return f"stopped after {limit_s:.0f} s, its limit: {log.name} shows how far it came"
        finally:
            _end(process, started)
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    return None if code == 0 else f"exit status {code}: {last[:300]}"


def _with_descendants(pid: int, known: list[psutil.Process]) -> list[psutil.Process]:
    """All processes that a check has started so far; workers have sessions of their own."""
    try:
        return list({one.pid: one for one in [*known, *psutil.Process(pid).children(recursive=True)]}.values())
    except psutil.NoSuchProcess:
        return known


def _end(process: subprocess.Popen[bytes], started: list[psutil.Process]) -> None:
    started = _with_descendants(process.pid, started)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.is_running():  # compares the time at which it began: no number is used twice unnoticed
                one.kill()
    process.wait()
    psutil.wait_procs(started, timeout=END_S)
