"""Throughput of a program of DeepSpeed: under DeepSpeed itself, and under Paceline by its import alone.

    python benchmarks/compat_deepspeed.py [--turns 20] [--block 8] [--size demo|large] [--stages 0,1,2,3]

It needs DeepSpeed: `make test-compat` installs it. The program is the example's GPT, with gradient accumulation, a
schedule and clipping, on two workers of one thread each, by each ZeRO stage. DeepSpeed's processes are started by
torchrun, over gloo, and use torch's own AdamW (`torch_adam`). Both sides are started once for each stage, and take
turns of so many steps, A B B A ..., while the other stands still. Each turn gives the median of its steps, each pair of
turns a ratio, and the table their medians and middle halves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = Path(__file__).parent / "programs" / "gpt_deepspeed.py"
SIZES = {"demo": (128, 4, 4, 4), "large": (384, 6, 6, 8)}  # width, layers, heads, samples of a micro-batch
PACKAGES = {"DeepSpeed": "deepspeed", "Paceline": "paceline.compat.deepspeed"}
WORKERS = 2


def job_of(side: str, size: str, stage: int) -> Job:
    """The program on one side, with a ZeRO stage."""

    def command(steps: int, out: str) -> list[str]:
        arguments = [*map(str, SIZES[size]), str(stage), str(steps), out, PACKAGES[side]]
        if side == "DeepSpeed":
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
            return [*start, str(PROGRAM), *arguments]
        start = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", str(WORKERS), "--device", "cpu"]
        start += ["--threads", "1", "--no-tensorboard", "--no-save-at-end", "--run-dir", f"{out}_run"]
        return [*start, "--", *arguments]

    return Job(command=command, workers=WORKERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages")
    quick: dict[str, object] = {"turns": 2, "block": 3, "size": "demo", "stages": "0"}
    options = options_of(parser, takes="about 15 minutes", quick=quick)
    print("| ZeRO stage | DeepSpeed, ms per step | Paceline, ms per step | throughput, Paceline / DeepSpeed |")
    print("|---|---|---|---|")
    for stage in map(int, options.stages.split(",")):
        jobs = [job_of(side, options.size, stage) for side in PACKAGES]
        theirs, ours = interleaved(jobs, turns=options.turns, block=options.block)
        low, middle, high = statistics.quantiles(a / b for a, b in zip(theirs, ours, strict=True))
        ratio = f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)"
        print(f"| {stage} | {statistics.median(theirs):.1f} | {statistics.median(ours):.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
