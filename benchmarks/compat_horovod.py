"""Throughput of a Horovod program, 2 workers of one thread each: by Paceline, by Horovod and beside DDP.

    python benchmarks/compat_horovod.py [--turns 20] [--block 8] [--size demo|large] [--horovod PYTHON]

The same file runs under `paceline run --as horovod` and under `horovodrun`, on the example's GPT; DDP on gloo is the
same training under torchrun. `--horovod` names a Python that has Horovod; without it that side is left out. All are
started once, and take turns of so many steps, A B C C B A ..., while the others stand still. Each turn gives the median
of its steps, each round ratios, and the table their medians and the middle half of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAMS = Path(__file__).parent / "programs"
SIZES = {"demo": (128, 4, 4, 4), "large": (384, 6, 6, 8)}  # width, layers, heads, samples of each worker
OWN, HOROVOD, DDP = "Paceline", "Horovod", "DDP on gloo"


def job_of(side: str, size: str, python: str) -> Job:
    def command(steps: int, out: str) -> list[str]:
        arguments = [*map(str, SIZES[size]), str(steps), out]
        program = str(PROGRAMS / "gpt_horovod.py")
        if side == OWN:
            start = [sys.executable, "-m", "paceline", "run", "--as", "horovod", program]
            return [*start, "--workers", "2", "--run-dir", f"{out}_run", "--", *arguments]
        if side == HOROVOD:
            start = [python, "-m", "horovod.runner.launch", "-np", "2", "-H", "localhost:2", "--gloo"]
            return [*start, python, program, *arguments]
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [*start, str(PROGRAMS / "gpt_ddp.py"), *arguments, "gloo"]

    return Job(command=command, workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--horovod", metavar="PYTHON", help="an interpreter that has Horovod (default: leave it out)")
    options = options_of(parser, takes="about 6 minutes", quick={"turns": 2, "block": 3, "size": "demo"})
    sides = [OWN, *([HOROVOD] if options.horovod else []), DDP]
    jobs = [job_of(side, options.size, options.horovod or "") for side in sides]
    took = dict(zip(sides, interleaved(jobs, turns=options.turns, block=options.block), strict=True))

    def ratio(side: str) -> str:
        low, middle, high = statistics.quantiles(other / own for other, own in zip(took[side], took[OWN], strict=True))
        return f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)"

    others = sides[1:]
    titles = [f"{side}, ms per step" for side in sides] + [f"throughput, Paceline / {side}" for side in others]
    print(f"| model | {' | '.join(titles)} |\n|---{'|---' * len(titles)}|")
    cells = [f"{statistics.median(took[side]):.1f}" for side in sides] + [ratio(side) for side in others]
    print(f"| {options.size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
