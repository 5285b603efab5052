"""Throughput of sharded layouts: Paceline against torch's `fully_shard` by hand under torchrun, same model and batch.

    python benchmarks/layouts.py [--size demo|large] [--pairs 5] [--steps 40] [--workers 2,4]

The two run in turn, A B B A ...; each run gives the median of its steps (the first tenth left out), each pair a ratio,
and the table the median of the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator

from sharded import SIZES, Setting, run


def layouts(workers: int) -> Iterator[tuple[int, int]]:
    """(replicas, zero) on so many workers."""
    yield from ((1, zero) for zero in (1, 2, 3))
    if workers % 2 == 0 and workers > 2:
        yield 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", default="2,4")
    options = parser.parse_args()
    print(
        "| workers | layout | Paceline, ms per step | by hand, ms per step | throughput, Paceline / by hand | pairs |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for workers in map(int, options.workers.split(",")):
        for replicas, zero in layouts(workers):
            ours = Setting(who="paceline", workers=workers, replicas=replicas, zero=zero)
            took: dict[str, list[float]] = {"paceline": [], "torch": []}
            for number in range(options.pairs):
                for who in ("paceline", "torch") if number % 2 == 0 else ("torch", "paceline"):
                    setting = dataclasses.replace(ours, who=who)
                    took[who].append(run(setting, options.size, options.steps).step_ms)
            ratios = [hand / own for own, hand in zip(took["paceline"], took["torch"], strict=True)]
            print(
                f"| {workers} | {ours.plan} | {statistics.median(took['paceline']):.1f} | "
                f"{statistics.median(took['torch']):.1f} | **{statistics.median(ratios):.3f}x** | "
                f"{min(ratios):.2f}x to {max(ratios):.2f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
