"""Throughput of a program of Accelerate: under Accelerate itself, and under Paceline by its import alone.

    python benchmarks/compat_accelerate.py [--turns 20] [--block 8] [--size demo|large]

It needs Accelerate: `make test-compat` installs it. The program is the example's GPT, with a schedule and clipping, on
one and on two workers of one thread each. Accelerate's processes are started by torchrun, over gloo. Both sides are
started once for each number of workers, and take turns of so many steps, A B B A ..., while the other stands still.
Each turn gives the median of its steps, each pair of turns a ratio, and the table their medians and middle halves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = Path(__file__).parent / "programs" / "gpt_accelerate.py"
SIZES = {"demo": (128, 4, 4, 4), "large": (384, 6, 6, 8)}  # width, layers, heads, samples of each worker
PACKAGES = {"Accelerate": "accelerate", "Paceline": "paceline.compat.accelerate"}


def job_of(side: str, size: str, *, workers: int) -> Job:
    """The program on one side, on so many workers."""

    def command(steps: int, out: str) -> list[str]:
        arguments = [*map(str, SIZES[size]), str(steps), out, PACKAGES[side]]
        if side == "Accelerate":
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
            return [*start, str(PROGRAM), *arguments]
        start = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", str(workers), "--device", "cpu"]
        start += ["--threads", "1", "--no-tensorboard", "--no-save-at-end", "--run-dir", f"{out}_run"]
        return [*start, "--", *arguments]

    return Job(command=command, workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=SIZES, default="large")
    options = options_of(parser, takes="about 8 minutes", quick={"turns": 2, "block": 3, "size": "demo"})
    print("| workers | Accelerate, ms per step | Paceline, ms per step | throughput, Paceline / Accelerate |")
    print("|---|---|---|---|")
    for workers in (1, 2):
        jobs = [job_of(side, options.size, workers=workers) for side in PACKAGES]
        theirs, ours = interleaved(jobs, turns=options.turns, block=options.block)
        low, middle, high = statistics.quantiles(a / b for a, b in zip(theirs, ours, strict=True))
        ratio = f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)"
        print(f"| {workers} | {statistics.median(theirs):.1f} | {statistics.median(ours):.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
