"""Throughput of 2 workers of one thread each: Paceline against torch's DistributedDataParallel under torchrun.

    python benchmarks/throughput.py [--turns 20] [--block 8] [--size demo|large|wide]

`demo` and `large` are the example's GPT; `wide` is a network of 50 million parameters on a batch of 8, whose gradients
take as long as its computing. DDP goes over gloo, and once more over shared memory, by `paceline.register_backend()`.
All are started once, and take turns of so many steps, A B C C B A ..., while the others stand still. Each turn gives
the median of its steps, each round ratios, and the table their medians and the middle half of them.
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
    "demo": ("gpt", (128, 4, 4, 4)),  # width, layers, heads, samples of each worker
    "large": ("gpt", (384, 6, 6, 8)),
    "wide": ("wide", (2048, 12, 8)),  # width, layers, samples of each worker
}
SIDES = {"paceline": "", "DDP on gloo": "gloo", "DDP in memory": "paceline"}  # and torch's back end


def job_of(side: str, size: str) -> Job:
    program, sizes = SIZES[size]

    def command(steps: int, out: str) -> list[str]:
        arguments = [*map(str, sizes), str(steps), out]
        if backend := SIDES[side]:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            return [*start, str(PROGRAMS / f"{program}_ddp.py"), *arguments, backend]
        start = [sys.executable, "-m", "paceline", "run", str(PROGRAMS / f"{program}_paceline.py")]
        return [*start, "--workers", "2", "--run-dir", f"{out}_run", "--", *arguments]

    return Job(command=command, workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=SIZES, default="large")
    options = options_of(parser, takes="about 6 minutes", quick={"turns": 2, "block": 3, "size": "demo"})
    jobs = [job_of(side, options.size) for side in SIDES]
    took = dict(zip(SIDES, interleaved(jobs, turns=options.turns, block=options.block), strict=True))

    def ratio(side: str) -> str:
        pairs = zip(took["DDP on gloo"], took[side], strict=True)
        low, middle, high = statistics.quantiles(gloo / own for gloo, own in pairs)
        return f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)"

    print(
        f"| model | {' | '.join(f'{side}, ms per step' for side in SIDES)} | throughput, Paceline / DDP on gloo |"
        " DDP in memory / on gloo |\n|---|---|---|---|---|---|"
    )
    cells = " | ".join(f"{statistics.median(one):.1f}" for one in took.values())
    print(f"| {options.size} | {cells} | {ratio('paceline')} | {ratio('DDP in memory')} |")


if __name__ == "__main__":
    main()
