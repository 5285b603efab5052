"""The automatic split into two pipeline stages against every possible split: 12 blocks, one of them three times as
heavy.

    python benchmarks/pipeline_split.py [--heavy 2] [--width 192] [--rows 64] [--rounds 24]

All splits are steps of one run, in turn, so that whatever else the machine does falls on all of them; a split's time is
the median of its steps, the first two left out, of the worker that takes longer.
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

from driving.options import options_of

PROGRAM = Path(__file__).parent / "programs" / "pipeline_split_paceline.py"
MICROS = 8


def measured(heavy: int, width: int, rows: int, rounds: int) -> list[float]:
    """The step time of each split, in ms; the first one is the automatic one. Exits where the program fails."""
    with tempfile.TemporaryDirectory() as scratch:
        plan = f"replicas=1+stages=2+batch(size={MICROS * rows},micro={rows})"
        command = [sys.executable, "-m", "paceline", "run", str(PROGRAM), "--workers", "2", "--plan", plan]
        command += ["--run-dir", f"{scratch}/run", "--", *map(str, (heavy, width, rows, rounds)), f"{scratch}/took"]
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=variables, stdout=sys.stderr, timeout=1500)  # which shows its steps
        found = [json.loads(path.read_text()) for path in Path(scratch).glob("took.*")]
    if done.returncode or len(found) != 2:
        raise SystemExit(f"{' '.join(command)} failed with exit status {done.returncode}; it said why above")
    by_split = zip(*found, strict=True)
    return [statistics.median(max(both) for both in list(zip(*workers, strict=True))[2:]) for workers in by_split]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heavy", default="2,6", help="which block is the heavy one, from 0")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=24)
    options = options_of(parser, takes="about 15 minutes", quick={"rounds": 4, "heavy": "2"})
    print("| heavy block | cut before block | ms per step | automatic, ms per step | automatic / best |")
    print("|---|---|---|---|---|", flush=True)
    for heavy in map(int, options.heavy.split(",")):
        automatic, *tried = measured(heavy, options.width, options.rows, options.rounds)
        best = min(tried)
        every = ", ".join(f"{number}: {ms:.0f}" for number, ms in enumerate(tried, start=1))
        best_at = tried.index(best) + 1
        print(
            f"| {heavy} | {best_at} is the best of: {every} | {best:.1f} | {automatic:.1f} | {automatic / best:.3f} |"
        )


if __name__ == "__main__":
    main()
