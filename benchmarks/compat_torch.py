"""The same DistributedDataParallel program under torchrun and under `paceline run`, unmodified: milliseconds of a step.

    python benchmarks/compat_torch.py [--turns 20] [--block 8] [--size demo|large|wide]

2 workers of one thread each. The program asks for gloo; under `paceline run` its group is in shared memory, and each
step and collective is recorded. Both are started once, and take turns of so many steps, A B B A ..., while the other
stands still. Each turn gives the median of its steps, each round a ratio, and the table their median and the middle
half of them.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from driving.beside import PROGRAMS, SIZES, add_turns, by_paceline, by_torchrun, cells, throughput
from driving.interleaved import Job, interleaved
from driving.options import options_of

WIDE = {"wide": (2048, 12, 8)}  # width, layers, samples of each worker


def program_of(size: str, steps: int, out: str) -> tuple[Path, list[object]]:
    """A program, and its arguments."""
    name = "wide_ddp.py" if size in WIDE else "gpt_ddp.py"
    return PROGRAMS / name, [*(SIZES | WIDE)[size], steps, out, "gloo"]


def torchrun_command(size: str, steps: int, out: str) -> list[str]:
    return by_torchrun(*program_of(size, steps, out), workers=2)


def paceline_command(size: str, steps: int, out: str) -> list[str]:
    return by_paceline(*program_of(size, steps, out), workers=2, out=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = options_of(parser, takes="about 5 minutes", quick=add_turns(parser, sizes=SIZES | WIDE))
    commands = [functools.partial(one, options.size) for one in (torchrun_command, paceline_command)]
    jobs = [Job(command=command, workers=2) for command in commands]
    theirs, ours = interleaved(jobs, turns=options.turns, block=options.block)
    print("| model | torchrun, ms per step | paceline run, ms per step | throughput, paceline run / torchrun |")
    print("|---|---|---|---|")
    print(f"| {' | '.join([options.size, *cells(theirs, ours), throughput(theirs, ours)])} |")


if __name__ == "__main__":
    main()
