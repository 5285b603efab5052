"""Peak memory of a worker of sharded replicas, against two formulas and against torch's `fully_shard` by hand.

    python benchmarks/memory.py [--size 100m] [--workers 2,4] [--zero 1,2,3] [--steps 5]

"Plain" is what ZeRO splits and nothing else; the formula is that of `Layout`'s docstring, which counts what computing
needs beside it. Both are for fp32 and Adam, and go with the activations: the peak of one process less its parameters,
gradients and optimizer state, on micro-batches of the same size.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from driving.options import options_of
from driving.sides import SIZES, peak_bytes, sharded

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))


def plain_bytes(total: int, *, shard: int, zero: int) -> float:
    """Bytes of parameters, gradients and Adam's two moments, `total` of the first, where ZeRO splits some of them."""
    num_split = {1: 2, 2: 3, 3: 4}[zero]
    return total * (4 - num_split) + total * num_split / shard


def formula_bytes(total: int, unit: int, *, shard: int, zero: int) -> float:
    """Bytes of model state at the peak of a step, of `total` parameter bytes, `unit` of them in the largest unit."""
    kept = 3 * total / shard  # parameters and Adam's two moments
    if zero == 1:
        return kept + 2 * total
    return kept + total / shard + (total + 2 * unit if zero == 2 else 3 * unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--zero", default="1,2,3")
    parser.add_argument("--steps", type=int, default=5)
    options = options_of(
        parser, takes="about 10 minutes", quick={"workers": "2", "zero": "3", "size": "tiny", "steps": 2}
    )
    from gpt import GPT

    model = GPT(*SIZES[options.size][:3])
    total = sum(p.numel() for p in model.parameters()) * 4
    unit = sum(p.numel() for p in next(iter(model.blocks)).parameters()) * 4
    one = peak_bytes(sharded("paceline", 1), options.size, options.steps)
    activations = one - 4 * total
    mib = 1 << 20
    print(f"{total / 4e6:.1f} M parameters: {total / mib:.0f} MiB, largest block {unit / mib:.0f} MiB")
    print(f"one process: {one / mib:.0f} MiB, of them activations and buffers {activations / mib:.0f} MiB\n")
    print(
        "| workers | zero | Paceline, MiB | plain + activations, MiB | ratio | formula + activations, MiB | ratio | "
        "fully_shard by hand, MiB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for workers in map(int, options.workers.split(",")):
        for zero in map(int, options.zero.split(",")):
            own, hand = (
                peak_bytes(sharded(framework, workers, zero=zero), options.size, options.steps)
                for framework in ("paceline", "torch")
            )
            plain = plain_bytes(total, shard=workers, zero=zero) + activations
            expected = formula_bytes(total, unit, shard=workers, zero=zero) + activations
            print(
                f"| {workers} | {zero} | {own / mib:.0f} | {plain / mib:.0f} | {own / plain:.2f} | "
                f"{expected / mib:.0f} | {own / expected:.2f} | {hand / mib:.0f} | {own / hand:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
