"""Runs one program of DeepSpeed on two workers: under DeepSpeed itself, and under Paceline.

The program prints a line "found {...}" of JSON on its first worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
from programs import PACELINE

__all__ = ["LIMIT_S", "WORKERS", "under_deepspeed", "under_paceline"]

LIMIT_S = 400.0
WORKERS = 2

# DeepSpeed's kernel for shared memory is compiled for minutes, where a compiler is there: gloo alone does the same.
START = """\
import os
import runpy
import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
if torch.distributed.is_initialized():
    torch.distributed.barrier()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # what DeepSpeed leaves to the interpreter's end sometimes aborts there: "terminate called without ..."
"""


def under_deepspeed(folder: Path, *words: str) -> dict[str, Any]:
    """Run folder/train.py with these arguments by torchrun; returns what it has found."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    (folder / "start.py").write_text(START)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*start, "start.py", "train.py", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return _found(done.stdout)


def under_paceline(folder: Path, *words: str) -> dict[str, Any]:
    """Run the same by `paceline run --as deepspeed`."""
    start = ("run", "--as", "deepspeed", "--workers", str(WORKERS), "train.py", *words)
    code, output = programs.run(*PACELINE, *start, cwd=folder, limit_s=LIMIT_S)
    if code:
        raise AssertionError(output)
    return _found(output)


def _found(output: str) -> dict[str, Any]:
    (line,) = (line for line in output.splitlines() if line.startswith("found "))
    return json.loads(line.removeprefix("found "))
