"""`--cluster here`: this machine, measured by `paceline doctor` for as many workers as there would be."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.errors import LaunchError
from paceline.planner.named_cluster import NamedCluster, cluster_named

__all__ = ["HERE", "this_machine"]

HERE = "here"
SECONDS = "0.2"  # of each test


def this_machine(workers: int) -> NamedCluster:
    """Measure, which takes some seconds; LaunchError, with the command's words, where it fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-here-") as folder:
        path = Path(folder) / "here.toml"
        words = ["doctor", "--workers", str(workers), "--seconds", SECONDS, "--name", HERE, "--out", str(path)]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words, "--run-dir", f"{folder}/run"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise LaunchError(f"This machine could not be measured: {(done.stderr or done.stdout).strip()}")
        found = cluster_named(str(path), workers)
    return NamedCluster(name=HERE, cluster=found.cluster, known=found.known)
