"""What both measurements of sharded layouts share: they run one program once, and read what its workers say."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
SIZES = {  # width, layers, heads, samples of a micro-batch, micro-batches of a worker
    "tiny": (64, 4, 4, 2, 2),
    "demo": (128, 4, 4, 4, 2),
    "large": (384, 6, 6, 4, 2),
    "100m": (832, 12, 13, 1, 2),  # 100.1 M parameters
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A layout, and who provides it: "paceline", or "torch" by hand."""

    who: str
    workers: int
    replicas: int = 1
    zero: int = 3

    @property
    def plan(self) -> str:
        shard = self.workers // self.replicas
        if shard == 1:
            return f"replicas={self.replicas}"
        return f"replicas={self.replicas}+shard={shard}+zero={self.zero}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Of one run: the median time of a step, and the largest peak of a worker."""

    step_ms: float
    peak_bytes: int


def run(setting: Setting, size: str, steps: int) -> Taken:
    """Run one program to its end; exits with what it said where it fails."""
    width, layers, heads, samples, micros = SIZES[size]
    shape = [*map(str, (width, layers, heads, samples, steps, micros))]
    with tempfile.TemporaryDirectory() as scratch:
        out = f"{scratch}/took"
        if setting.who == "torch":
            script = str(PROGRAMS / "shard_torch.py")
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(setting.workers), script]
            command = [sys.executable, *launch, str(setting.zero), str(setting.replicas), *shape, out]
        else:
            batch = f"batch(size={samples * micros * setting.workers},micro={samples})"
            launch = ["-m", "paceline", "run", str(PROGRAMS / "shard_paceline.py"), "--workers", str(setting.workers)]
            options = ["--plan", f"{setting.plan}+{batch}", "--run-dir", f"{scratch}/run"]
            command = [sys.executable, *launch, *options, "--", *shape, out]
        # glibc keeps what was freed below a threshold that grows by itself: fixed, resident memory is memory in use.
        extra = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=3000)
        found = [json.loads(path.read_text()) for path in Path(scratch).glob("took.*")]
        if done.returncode or len(found) != setting.workers:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    took = [one["took_ms"][max(2, steps // 10) :] for one in found]
    return Taken(
        step_ms=statistics.median(max(each) for each in zip(*took, strict=True)),
        peak_bytes=max(one["peak"] for one in found),
    )
