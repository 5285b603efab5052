"""Throughput of a Horovod program, 2 workers of one thread each: by Paceline, by Horovod and beside DDP.

    python benchmarks/compat_horovod.py [--turns 20] [--block 8] [--size demo|large] [--horovod PYTHON]

The same file runs under `paceline run --as horovod` and under `horovodrun`, on the example's GPT; DDP on gloo is the
same training under torchrun. `--horovod` names a Python that has Horovod; without it that side is left out. All are
started once, and take turns of so many steps, A B C C B A ..., while the others stand still. Each turn gives the median
of its steps, each round ratios, and the table their medians and the middle half of them.
"""

from __future__ import annotations

import argparse
import functools

from driving.beside import PROGRAMS, SIZES, add_turns, by_paceline, by_torchrun, cells, throughput
from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = PROGRAMS / "gpt_horovod.py"
OWN, HOROVOD, DDP = "Paceline", "Horovod", "DDP on gloo"


def command_of(side: str, size: str, python: str, steps: int, out: str) -> list[str]:
    words = [*SIZES[size], steps, out]
    if side == OWN:
        return by_paceline(PROGRAM, words, workers=2, out=out, options=("--as", "horovod"))
    if side == HOROVOD:
        start = [python, "-m", "horovod.runner.launch", "-np", "2", "-H", "localhost:2", "--gloo"]
        return [*start, python, str(PROGRAM), *map(str, words)]
    return by_torchrun(PROGRAMS / "gpt_ddp.py", [*words, "gloo"], workers=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--horovod", metavar="PYTHON", help="an interpreter that has Horovod (default: leave it out)")
    options = options_of(parser, takes="about 6 minutes", quick=add_turns(parser))
    sides = [OWN, *([HOROVOD] if options.horovod else []), DDP]
    commands = [functools.partial(command_of, side, options.size, options.horovod or "") for side in sides]
    own, *others = interleaved(
        [Job(command=command, workers=2) for command in commands], turns=options.turns, block=options.block
    )
    titles = [f"{side}, ms per step" for side in sides] + [f"throughput, Paceline / {side}" for side in sides[1:]]
    print(f"| model | {' | '.join(titles)} |\n|---{'|---' * len(titles)}|")
    ratios = [throughput(other, own) for other in others]
    print(f"| {' | '.join([options.size, *cells(own, *others), *ratios])} |")


if __name__ == "__main__":
    main()
