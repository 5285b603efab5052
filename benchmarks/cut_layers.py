"""Throughput of layers that are cut: Paceline's own plan against torch's `parallelize_module` by hand under torchrun.

    python benchmarks/cut_layers.py [--size demo|large] [--pairs 5] [--steps 30] [--workers 2,4]

A Llama of the transformers package on both sides. The two run in turn, A B B A ...; each run gives the median of its
steps (the first tenth left out), each pair a ratio, and the table the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sharded import SIZES, Taken

PROGRAMS = Path(__file__).parent / "programs"


def run(who: str, workers: int, size: str, steps: int) -> Taken:
    """Run one program to its end; exits with what it said where it fails."""
    width, layers, heads, samples, micros = SIZES[size]
    with tempfile.TemporaryDirectory() as scratch:
        out = f"{scratch}/took"
        shape = [*map(str, (width, layers, heads, samples, steps, micros)), out]
        if who == "torch":
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
            command = [sys.executable, *launch, str(PROGRAMS / "cut_torch.py"), *shape]
        else:
            plan = f"replicas=1+tensor={workers}+batch(size={samples * micros},micro={samples})"
            launch = ["-m", "paceline", "run", str(PROGRAMS / "cut_paceline.py"), "--workers", str(workers)]
            command = [sys.executable, *launch, "--plan", plan, "--run-dir", f"{scratch}/run", "--", *shape]
        extra = {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=os.environ | extra, capture_output=True, text=True, timeout=3000)
        found = [json.loads(path.read_text()) for path in Path(scratch).glob("took.*")]
        if done.returncode or len(found) != workers:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    took = [one["took_ms"][max(2, steps // 10) :] for one in found]
    return Taken(
        step_ms=statistics.median(max(each) for each in zip(*took, strict=True)),
        peak_bytes=max(one["peak"] for one in found),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", default="2,4")
    options = parser.parse_args()
    print("| workers | Paceline, ms per step | by hand, ms per step | throughput, Paceline / by hand | pairs |")
    print("|---|---|---|---|---|", flush=True)
    for workers in map(int, options.workers.split(",")):
        took: dict[str, list[float]] = {"paceline": [], "torch": []}
        for number in range(options.pairs):
            for who in ("paceline", "torch") if number % 2 == 0 else ("torch", "paceline"):
                took[who].append(run(who, workers, options.size, options.steps).step_ms)
        ratios = [hand / own for own, hand in zip(took["paceline"], took["torch"], strict=True)]
        print(
            f"| {workers} | {statistics.median(took['paceline']):.1f} | {statistics.median(took['torch']):.1f} | "
            f"**{statistics.median(ratios):.3f}x** | {min(ratios):.2f}x to {max(ratios):.2f}x |",
            flush=True,
        )


if __name__ == "__main__":
    main()
