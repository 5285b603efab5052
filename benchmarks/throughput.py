"""Throughput of 2 workers of one thread each on the example's GPT: Paceline against torch's DistributedDataParallel
under torchrun.

    python benchmarks/throughput.py [--pairs 5] [--steps 60] [--size demo|large]

The two run in turn, A B B A ...; each run gives the median of its steps (the first tenth left out), each pair a ratio,
and the table the median of the ratios.
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

PROGRAMS = Path(__file__).parent / "programs"
SIZES = {"demo": (128, 4, 4, 4), "large": (384, 6, 6, 8)}  # width, layers, heads, samples of each worker


def step_ms(name: str, size: str, steps: int) -> float:
    """Run one program once; the median time of its steps."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "took.json"
        arguments = [*map(str, SIZES[size]), str(steps), str(out)]
        script = str(PROGRAMS / f"gpt_{name}.py")
        if name == "ddp":
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                script,
                *arguments,
            ]
        else:
            command = [
                sys.executable,
                "-m",
                "paceline",
                "run",
                script,
                "--workers",
                "2",
                "--run-dir",
                f"{scratch}/run",
                "--",
                *arguments,
            ]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
        )
        if done.returncode or not out.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        took = json.loads(out.read_text())
    return statistics.median(took[max(2, len(took) // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="large")
    options = parser.parse_args()
    rows: list[tuple[float, float]] = []
    for pair in range(options.pairs):
        order = ["paceline", "ddp"] if pair % 2 == 0 else ["ddp", "paceline"]
        times = {name: step_ms(name, options.size, options.steps) for name in order}
        rows.append((times["paceline"], times["ddp"]))
        print(
            f"pair {pair + 1}: paceline {rows[-1][0]:.1f} ms, DDP {rows[-1][1]:.1f} ms, "
            f"{rows[-1][1] / rows[-1][0]:.3f}x",
            flush=True,
        )
    ours, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(b / a for a, b in rows)
    print("\n| model | Paceline, ms per step | DDP, ms per step | throughput, Paceline / DDP |\n|---|---|---|---|")
    print(f"| {options.size} | {ours:.1f} | {theirs:.1f} | **{ratio:.3f}x** |")


if __name__ == "__main__":
    main()
