"""What the comparisons with other frameworks share: sizes of the model, options, how a side is started, and cells."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["PROGRAMS", "SIZES", "add_turns", "by_paceline", "by_torchrun", "cells", "throughput"]

PROGRAMS = Path(__file__).parents[1] / "programs"
SIZES: dict[str, tuple[int, ...]] = {  # width, layers, heads, samples of a micro-batch
    "demo": (128, 4, 4, 4),
    "large": (384, 6, 6, 8),
}
QUICK: dict[str, object] = {"turns": 2, "block": 3, "size": "demo"}


def add_turns(parser: argparse.ArgumentParser, *, sizes: Iterable[str] = SIZES) -> dict[str, object]:
    """Add the options of jobs that take turns; returns what `--quick` puts in place of their defaults."""
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps of a turn")
    parser.add_argument("--size", choices=tuple(sizes), default="large")
    return dict(QUICK)


def by_torchrun(program: Path, words: Sequence[object], *, workers: int) -> list[str]:
    """The command line of a program with these words, on so many workers of one host, under torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return [*start, str(program), *map(str, words)]


def by_paceline(
    program: Path, words: Sequence[object], *, workers: int, out: str, options: Sequence[str] = ()
) -> list[str]:
    """The same under `paceline run`, with these options of it; its run directory is beside OUT."""
    start = [sys.executable, "-m", "paceline", "run", *options, str(program), "--workers", str(workers)]
    return [*start, "--run-dir", f"{out}_run", "--", *map(str, words)]


def cells(*sides: Sequence[float]) -> list[str]:
    """The middle of each side's milliseconds per step, as cells of a table."""
    return [f"{statistics.median(side):.1f}" for side in sides]


def throughput(other: Sequence[float], own: Sequence[float]) -> str:
    """How many steps Paceline takes while the other takes one, of the milliseconds in each turn: their middle, and
    their middle half."""
    low, middle, high = statistics.quantiles(theirs / ours for theirs, ours in zip(other, own, strict=True))
    return f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)"
