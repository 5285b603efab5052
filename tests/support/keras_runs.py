"""Runs the Keras programs of tests/compat under `paceline run`, or by themselves, and compares their histories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["HERE", "compare", "run_own", "run_program"]

HERE = Path(__file__).parent.parent / "compat" / "keras"
LIMIT_S = 550.0  # of one run: frameworks take long to import on a loaded machine
SAME = 1e-6


def environment() -> dict[str, str]:
    paths = [str(HERE.parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_program(
    program: str | Path,
    out: Path,
    *args: str,
    workers: int,
    plan: str | None = None,
    run_dir: Path | None = None,
    options: tuple[str, ...] = (),
    fails: bool = False,
) -> Any:
    """Run a program with `out` and `args`, and return what it has written to `out`; of one that fails its errors."""
    words = [sys.executable, "-m", "paceline", "run", str(HERE / program), "--workers", str(workers), "--threads", "1"]
    words += ["--run-dir", str(run_dir or out.with_suffix(".run")), *options]
    words += [] if plan is None else ["--plan", plan]
    done = subprocess.run(
        [*words, "--", *args, str(out)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=out.parent,
    )
    assert (done.returncode != 0) is fails, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr if fails else json.loads(out.read_text())


def run_own(program: str | Path, out: Path, *args: str) -> Any:
    """Run a program by itself, and return what it has written to `out`."""
    words = [sys.executable, str(HERE / program), *args, str(out), "--own"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, cwd=out.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


def compare(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Assert that two histories have the same names and, to rounding, numbers."""
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        assert len(found[name]) == len(numbers), name
        for one, other in zip(found[name], numbers, strict=True):
            assert abs(one - other) <= SAME * max(1.0, abs(other)), (name, one, other)
