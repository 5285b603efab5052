"""What the measurements of layouts share: they run one program once, under Paceline or torchrun, and read what its
workers say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from driving.interleaved import Job
from driving.progress import doing

__all__ = ["SIZES", "Side", "job_of", "peak_bytes", "said", "sharded"]

PROGRAMS = Path(__file__).parents[1] / "programs"
SIZES = {  # width, layers, heads, samples of a micro-batch, micro-batches of a worker
    "tiny": (64, 4, 4, 2, 2),
    "demo": (128, 4, 4, 4, 2),
    "large": (384, 6, 6, 4, 2),
    "100m": (832, 12, 13, 1, 2),  # 100.1 M parameters
    "1b": (2048, 20, 16, 32, 1),  # 1,008 M parameters
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A program on so many workers: under Paceline where it has a plan, else by hand under torchrun."""

    program: str
    workers: int
    plan: str = ""
    words: tuple[str, ...] = ()  # the program's own, before the model's sizes
    micros: int | None = None  # of a step; None: the size's own, of each worker that has other samples
    num_feeds: int = 1  # workers that have other samples


def sharded(framework: str, workers: int, *, replicas: int = 1, zero: int = 3) -> Side:
    """Return replicas that are sharded over the rest of the workers: by "paceline", or by "torch" by hand."""
    if framework == "torch":
        return Side(program="shard_torch.py", workers=workers, words=(str(zero), str(replicas)), num_feeds=workers)
    shard = workers // replicas
    layout = f"replicas={replicas}" + (f"+shard={shard}+zero={zero}" if shard > 1 else "")
    return Side(program="shard_paceline.py", workers=workers, plan=layout, num_feeds=workers)


def job_of(side: Side, size: str) -> Job:
    """The same as a job that takes turns with others."""
    return Job(command=lambda steps, out: _command(side, size, steps, out), workers=side.workers)


def peak_bytes(side: Side, size: str, steps: int) -> int:
    """Run one program to its end, and return the largest peak of a worker; exits with what it said where it fails.

    glibc keeps what was freed below a threshold that grows by itself. Here it is fixed, so that resident memory is
    memory in use; that costs time, of which nothing is said.
    """
    settled = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "PEAK_SINCE_STEP": "2"}
    return max(one["peak"] for one in said(side, size, steps, environment=settled))


def said(side: Side, size: str, steps: int, *, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run one program to its end, and return what each worker has written; exits where it fails."""
    doing(f"{side.program}: {steps} steps on {side.workers} workers")
    with tempfile.TemporaryDirectory() as scratch:
        command = _command(side, size, steps, f"{scratch}/took")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3000)
        found = [json.loads(path.read_text()) for path in Path(scratch).glob("took.*")]
    if done.returncode or len(found) != side.workers:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return found


def _command(side: Side, size: str, steps: int, out: str) -> list[str]:
    width, layers, heads, samples, micros = SIZES[size]
    micros = side.micros or micros
    shape = [*map(str, (width, layers, heads, samples, steps, micros)), out]
    program = str(PROGRAMS / side.program)
    if side.plan:
        plan = f"{side.plan}+batch(size={samples * micros * side.num_feeds},micro={samples})"
        command = [sys.executable, "-m", "paceline", "run", program, "--workers", str(side.workers)]
        command += ["--plan", plan, "--run-dir", f"{out}_run", "--max-steps", str(steps), "--"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(side.workers), program]
    return [*command, *side.words, *shape]
