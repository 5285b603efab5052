"""Throughput of a program of Accelerate: under Accelerate itself, and under Paceline by its import alone.

    python benchmarks/compat_accelerate.py [--turns 20] [--block 8] [--size demo|large]

It needs Accelerate: `make test-compat` installs it. The program is the example's GPT, with a schedule and clipping, on
one and on two workers of one thread each. Accelerate's processes are started by torchrun, over gloo. Both sides are
started once for each number of workers, and take turns of so many steps, A B B A ..., while the other stands still.
Each turn gives the median of its steps, each pair of turns a ratio, and the table their medians and middle halves.
"""

from __future__ import annotations

import argparse
import functools

from driving.beside import PROGRAMS, SIZES, add_turns, by_paceline, by_torchrun, cells, throughput
from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = PROGRAMS / "gpt_accelerate.py"
PACELINE = ("--device", "cpu", "--threads", "1", "--no-tensorboard", "--no-save-at-end")


def accelerate_command(size: str, workers: int, steps: int, out: str) -> list[str]:
    return by_torchrun(PROGRAM, [*SIZES[size], steps, out, "accelerate"], workers=workers)


def paceline_command(size: str, workers: int, steps: int, out: str) -> list[str]:
    words = [*SIZES[size], steps, out, "paceline.compat.accelerate"]
    return by_paceline(PROGRAM, words, workers=workers, out=out, options=PACELINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = options_of(parser, takes="about 8 minutes", quick=add_turns(parser))
    print("| workers | Accelerate, ms per step | Paceline, ms per step | throughput, Paceline / Accelerate |")
    print("|---|---|---|---|")
    for workers in (1, 2):
        commands = [functools.partial(one, options.size, workers) for one in (accelerate_command, paceline_command)]
        jobs = [Job(command=command, workers=workers) for command in commands]
        theirs, ours = interleaved(jobs, turns=options.turns, block=options.block)
        print(f"| {' | '.join([str(workers), *cells(theirs, ours), throughput(theirs, ours)])} |", flush=True)


if __name__ == "__main__":
    main()
