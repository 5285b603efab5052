"""What a step costs beyond the bare loop, on one process: blocks of steps of both, in turn, in the same process.

python benchmarks/overhead.py [--size demo|large] [--blocks 20] [--steps 10]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import paceline
from paceline import Batch, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from driving.options import options_of
from gpt import GPT, next_byte_loss, standard_library, windows

SIZES = {"demo": (128, 4, 4, 8), "large": (384, 6, 6, 8)}  # width, layers, heads, samples


def measure(worker: paceline.Worker, size: str, blocks: int, steps: int) -> list[tuple[float, float]]:
    """Return (Paceline's, the bare loop's) seconds of each pair of blocks."""
    width, layers, heads, samples = SIZES[size]
    text, _ = standard_library()
    data = windows(text, (2 * blocks + 2) * steps * samples)
    model = worker.prepare(GPT(width, layers, heads))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    step = worker.stepper(model, optim, next_byte_loss, clip_norm=1.0)
    batches = worker.batches(data)
    bare = GPT(width, layers, heads)
    bare_optim = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True)
    bare_batches = iter(DataLoader(data, batch_size=samples, shuffle=True))

    def ours() -> float:
        began = time.perf_counter()
        for batch in itertools.islice(batches, steps):
            worker.report(loss=step(batch))
        return time.perf_counter() - began

    def theirs() -> float:
        began = time.perf_counter()
        for x, y in itertools.islice(bare_batches, steps):
            bare_optim.zero_grad()
            loss = next_byte_loss(bare(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            bare_optim.step()
            loss.item()
        return time.perf_counter() - began

    ours()  # warm
    theirs()
    rows = []
    for block in range(blocks):
        pair = [ours(), theirs()] if block % 2 == 0 else [theirs(), ours()][::-1]
        rows.append((pair[0], pair[1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    options = options_of(parser, takes="about 5 minutes", quick={"blocks": 2, "size": "demo"})
    with tempfile.TemporaryDirectory() as scratch:
        rows = paceline.run(
            lambda worker: measure(worker, options.size, options.blocks, options.steps),
            workers=1,
            threads=1,
            plan=Plan(batch=Batch(size=SIZES[options.size][3], micro=SIZES[options.size][3])),
            run_dir=f"{scratch}/run",
            save_at_end=False,
        )
    ours, theirs = (1000 * statistics.median(column) / options.steps for column in zip(*rows, strict=True))
    ratio = statistics.median(a / b for a, b in rows)
    print("\n| model | Paceline, ms per step | bare loop, ms per step | overhead |\n|---|---|---|---|")
    print(f"| {options.size} | {ours:.2f} | {theirs:.2f} | **{100 * (ratio - 1):+.2f} %** |")


if __name__ == "__main__":
    main()
