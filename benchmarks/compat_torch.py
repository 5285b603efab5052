"""The same DistributedDataParallel program under torchrun and under `paceline run`, unmodified: milliseconds of a step.

    python benchmarks/compat_torch.py [--turns 20] [--block 8] [--size demo|large|wide]

2 workers of one thread each. The program asks for gloo; under `paceline run` its group is in shared memory, and each
step and collective is recorded. Both are started once, and take turns of so many steps, A B B A ..., while the other
stands still. Each turn gives the median of its steps, each round a ratio, and the table their median and the middle
half of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAMS = Path(__file__).parent / "programs"
SIZES = {  # program, and its arguments
    "demo": ("gpt_ddp", (128, 4, 4, 4)),  # width, layers, heads, samples of each worker
    "large": ("gpt_ddp", (384, 6, 6, 8)),
    "wide": ("wide_ddp", (2048, 12, 8)),  # width, layers, samples of each worker
}
SIDES = ("torchrun", "paceline run")


def job_of(side: str, size: str) -> Job:
    program, sizes = SIZES[size]

    def command(steps: int, out: str) -> list[str]:
        arguments = [*map(str, sizes), str(steps), out, "gloo"]
        script = str(PROGRAMS / f"{program}.py")
        if side == "torchrun":
            return [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                script,
                *arguments,
            ]
        start = [sys.executable, "-m", "paceline", "run", script, "--workers", "2", "--run-dir", f"{out}_run"]
        return [*start, "--", *arguments]

    return Job(command=command, workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=SIZES, default="large")
    options = options_of(parser, takes="about 5 minutes", quick={"turns": 2, "block": 3, "size": "demo"})
    jobs = [job_of(side, options.size) for side in SIDES]
    took = dict(zip(SIDES, interleaved(jobs, turns=options.turns, block=options.block), strict=True))
    ratios = [other / own for other, own in zip(took["torchrun"], took["paceline run"], strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    print("| model | torchrun, ms per step | paceline run, ms per step | throughput, paceline run / torchrun |")
    print("|---|---|---|---|")
    cells = " | ".join(f"{statistics.median(took[side]):.1f}" for side in SIDES)
    print(f"| {options.size} | {cells} | **{middle:.3f}x** ({low:.3f}x to {high:.3f}x) |")


if __name__ == "__main__":
    main()
