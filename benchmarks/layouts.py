"""Throughput of every layout: Paceline against the same thing by hand on torch, under torchrun, same model and batch.

    python benchmarks/layouts.py [--size demo|large] [--starts 4] [--turns 8] [--block 6] [--workers 2,4]
                                 [--only shard,tensor,stages]

By hand: `fully_shard` in a loop, `parallelize_module` with the tutorial's plan (a Llama), torch's pipelining schedules.
Both are started together, and take turns of so many steps, A B B A ..., while the other one stands still; and that
several times, since where the memory of a start lies makes some per cent. Each pair of turns, by the medians of their
steps, gives a ratio, and the table the median of the ratios of all starts and the middle half of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

from driving.interleaved import interleaved
from driving.options import options_of
from driving.sides import SIZES, Side, job_of, sharded

KINDS = "shard,tensor,stages"


def sides(kind: str, workers: int) -> Iterator[tuple[str, Side, Side]]:
    """Yield (layout, Paceline's side, the other one)."""
    if kind == "shard":
        replicas = [(1, 1), (1, 2), (1, 3), *([(2, 3)] if workers > 2 and workers % 2 == 0 else [])]
        for count, zero in replicas:
            ours, hand = (sharded(framework, workers, replicas=count, zero=zero) for framework in ("paceline", "torch"))
            yield ours.plan, ours, hand
    if kind == "tensor":
        plan = f"replicas=1+tensor={workers}"
        yield plan, Side(program="tensor_paceline.py", workers=workers, plan=plan), hand_of("tensor_torch.py", workers)
    if kind == "stages":
        micros = 2 * workers
        for schedule in ("gpipe", "1f1b"):
            plan = f"replicas=1+stages={workers}+schedule={schedule}"
            ours = Side(program="shard_paceline.py", workers=workers, plan=plan, micros=micros)
            yield plan, ours, hand_of("pipe_torch.py", workers, schedule, micros=micros)


def hand_of(program: str, workers: int, *words: str, micros: int | None = None) -> Side:
    return Side(program=program, workers=workers, words=words, micros=micros)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8, help="of each start")
    parser.add_argument("--block", type=int, default=6, help="steps of a turn")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--only", default=KINDS)
    options = options_of(
        parser, takes="about 40 minutes", quick={"starts": 1, "turns": 2, "workers": "2", "only": "tensor"}
    )
    heads = ["workers", "layout", "Paceline, ms per step", "by hand, ms per step", "Paceline / by hand", "middle half"]
    print(f"| {' | '.join(heads)} |")
    print("|---|---|---|---|---|---|", flush=True)
    for workers in map(int, options.workers.split(",")):
        for kind in options.only.split(","):
            for layout, ours, hand in sides(kind, workers):
                own, other = list[float](), list[float]()
                for _ in range(options.starts):
                    jobs = [job_of(side, options.size) for side in (ours, hand)]
                    for all_of_it, took in zip(
                        (own, other), interleaved(jobs, turns=options.turns, block=options.block), strict=True
                    ):
                        all_of_it += took
                own_ms, hand_ms = statistics.median(own), statistics.median(other)
                low, middle, high = statistics.quantiles(b / a for a, b in zip(own, other, strict=True))
                print(
                    f"| {workers} | `{layout.removeprefix('replicas=1+')}` | {own_ms:.1f} | {hand_ms:.1f} | "
                    f"**{middle:.3f}x** | {low:.3f}x to {high:.3f}x |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
