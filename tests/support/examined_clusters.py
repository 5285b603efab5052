"""`paceline doctor` on an engine in tests: the command, with a run directory that hosts may not share, and its file."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.cli.main import main
from paceline.planner.cluster import load_catalogue

__all__ = ["MATCHED", "doctor_command", "require_cluster"]

LIMIT_S = 180.0
MATCHED = ("--seconds", "0.05", "--name", "lab", "--out", "lab.toml", "--run-dir", "runs/d")


def doctor_command(
    folder: Path, *words: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None, hides: bool = False
) -> subprocess.CompletedProcess[str]:
    """Give the command in a folder, and wait for its end. `hides`: the folder `runs` of this command is its own, and no
    host sees it.
    """
    command = [sys.executable, "-m", "paceline", "doctor", *words, *MATCHED]
    if hides:
        (folder / "runs").mkdir(exist_ok=True)
        hide = f"mount -t tmpfs none {shlex.quote(str(folder / 'runs'))}"
        command = ["unshare", "--mount", "sh", "-c", f'{hide} && exec "$@"', "sh", *command]
    return subprocess.run(
        [*prefix, *command],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def require_cluster(
    done: subprocess.CompletedProcess[str], program: Path, *, hosts: Sequence[str] | int, each: int
) -> dict[str, Any]:
    """Assert that the command has left a cluster of these hosts, with so many workers on the fullest, that `paceline
    plan` takes; return the file's contents. `hosts`: their names, or how many.
    """
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cluster  lab.toml: " in done.stdout, done.stdout + done.stderr
    path = program.parent / "lab.toml"
    cluster = load_catalogue(path).clusters["lab"]
    number = hosts if isinstance(hosts, int) else len(hosts)
    assert (cluster.hosts, cluster.devices_per_host) == (number, each)
    contents = tomllib.loads(path.read_text())
    assert len(contents["pairs"]) == number * (number - 1) // 2
    assert all(pair["gb_s"] > 0 and pair["latency_us"] > 0 for pair in contents["pairs"])
    if not isinstance(hosts, int):
        assert {name for pair in contents["pairs"] for name in pair["hosts"]} == set(hosts)
    words = [str(program), "--workers", str(number * each), "--cluster", str(path), "--plan", "batch(size=24,micro=4)"]
    assert main(["plan", *words]) == 0
    return contents
