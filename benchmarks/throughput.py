"""Throughput of 2 workers of one thread each: Paceline against torch's DistributedDataParallel under torchrun.

    python benchmarks/throughput.py [--pairs 5] [--steps 60] [--size demo|large|wide]

`demo` and `large` are the example's GPT; `wide` is a network of 50 million parameters on a batch of 8, whose gradients
take as long as its computing. DDP goes over gloo, and once more over shared memory, by `paceline.register_backend()`.
All run in turn, A B C C B A ...; each run gives the median of its steps (the first tenth left out), each round ratios,
and the table their medians.
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
SIZES = {  # program, and its arguments
    "demo": ("gpt", (128, 4, 4, 4)),  # width, layers, heads, samples of each worker
    "large": ("gpt", (384, 6, 6, 8)),
    "wide": ("wide", (2048, 12, 8)),  # width, layers, samples of each worker
}
SIDES = {"paceline": "", "DDP on gloo": "gloo", "DDP in memory": "paceline"}  # and torch's back end


def step_ms(side: str, size: str, steps: int) -> float:
    """Run one program once; the median time of its steps."""
    program, sizes = SIZES[size]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "took"
        arguments = [*map(str, sizes), str(steps), str(out)]
        if backend := SIDES[side]:
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command = [*start, str(PROGRAMS / f"{program}_ddp.py"), *arguments, backend]
        else:
            start = [sys.executable, "-m", "paceline", "run", str(PROGRAMS / f"{program}_paceline.py")]
            command = [*start, "--workers", "2", "--run-dir", f"{scratch}/run", "--", *arguments]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
        )
        first = out.with_suffix(".0")  # of the first worker
        if done.returncode or not first.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        took = json.loads(first.read_text())["took_ms"]
    return statistics.median(took[max(2, len(took) // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="large")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    for number in range(options.pairs):
        order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
        times = {side: step_ms(side, options.size, options.steps) for side in order}
        rounds.append(times)
        told = ", ".join(f"{side} {times[side]:.1f} ms" for side in SIDES)
        print(f"round {number + 1}: {told}, {times['DDP on gloo'] / times['paceline']:.3f}x", flush=True)

    def ratio(side: str) -> float:
        return statistics.median(times["DDP on gloo"] / times[side] for times in rounds)

    medians = [statistics.median(times[side] for times in rounds) for side in SIDES]
    print(
        f"\n| model | {' | '.join(f'{side}, ms per step' for side in SIDES)} | throughput, Paceline / DDP on gloo |"
        " DDP in memory / on gloo |\n|---|---|---|---|---|---|"
    )
    cells = " | ".join(f"{one:.1f}" for one in medians)
    print(f"| {options.size} | {cells} | **{ratio('paceline'):.3f}x** | {ratio('DDP in memory'):.3f}x |")


if __name__ == "__main__":
    main()
