"""What each way to agree costs on one host: the demo's GPT on 2 workers of one thread each, under every sync and wire.

    python benchmarks/syncs.py [--turns 6] [--block 17] [--plans "allreduce+int8" ...]

All plans are started once, and take turns of so many steps, A B C C B A ..., while the others stand still; the first
step of a turn does not count, so that 16 are left, two rounds of `localsgd(every=8)`. Ratios are to `allreduce+raw` in
the same round: their medians, and the middle half of them. Here workers share memory, and the two cores are busy with
computing, so it is what encoding, servers and mirrors take of the processor; on slow networks see `sites.py`.

"without the noise scale" is `allreduce+raw` with `--no-noise-scale`. The others measure it in each of these steps, as
in the first 300 of every run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = Path(__file__).parent / "programs" / "gpt_paceline.py"
SIZES = (128, 4, 4, 4)  # width, layers, heads, samples of each worker: the demo's
FIRST, QUIET = "allreduce+raw", "without the noise scale"
PLANS = (
    FIRST,
    QUIET,
    "allreduce(algorithm=ring)+raw",
    "allreduce(op=adasum)+raw",
    "allreduce+cast(dtype=bf16)",
    "allreduce+int8",
    "allreduce+onebit",
    "allreduce+topk(ratio=0.01)",
    "allreduce+powersgd(rank=4)",
    "allreduce+sparse",
    "localsgd(every=8)+raw",
    "localsgd(every=8,outer=nesterov)+raw",
    "localsgd(every=8,fragments=2,overlap=2)+raw",
    "localsgd(every=8)+int8",
    "gossip(peers=ring)+raw",
    "parameterserver+raw",
    "parameterserver(servers=2)+raw",
    "parameterserver(mirrored=true)+raw",
)


def job_of(plan: str) -> Job:
    options = ["--no-noise-scale"] if plan == QUIET else []
    words = f"{FIRST if plan == QUIET else plan}+batch(size={2 * SIZES[-1]},micro={SIZES[-1]})"

    def command(steps: int, out: str) -> list[str]:
        start = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", "2", "--run-dir", f"{out}_run"]
        return [*start, "--plan", words, *options, "--", *map(str, SIZES), str(steps), out]

    return Job(command=command, workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--block", type=int, default=17, help="steps of a turn")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    options = options_of(
        parser, takes="about 20 minutes", quick={"turns": 2, "block": 3, "plans": ["allreduce+raw", "allreduce+int8"]}
    )
    if options.turns < 2:
        parser.error(f"--turns is {options.turns}; quantiles need at least 2")
    plans = list(dict.fromkeys([FIRST, *options.plans]))
    found = interleaved([job_of(plan) for plan in plans], turns=options.turns, block=options.block, of=statistics.fmean)
    took = dict(zip(plans, found, strict=True))
    print("| sync and wire | ms per step | of `allreduce+raw` | middle half |\n|---|---|---|---|")
    for plan, times in took.items():
        low, middle, high = statistics.quantiles(own / raw for own, raw in zip(times, took[FIRST], strict=True))
        name = plan if plan == QUIET else f"`{plan}`"
        print(f"| {name} | {statistics.median(times):.1f} | **{middle:.2f}x** | {low:.2f}x to {high:.2f}x |")


if __name__ == "__main__":
    main()
