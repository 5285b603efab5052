"""Throughput of a program of DeepSpeed: under DeepSpeed itself, and under Paceline by its import alone.

    python benchmarks/compat_deepspeed.py [--turns 20] [--block 8] [--size demo|large] [--stages 0,1,2,3]

It needs DeepSpeed: `make test-compat` installs it. The program is the example's GPT, with gradient accumulation, a
schedule and clipping, on two workers of one thread each, by each ZeRO stage. DeepSpeed's processes are started by
torchrun, over gloo, and use torch's own AdamW (`torch_adam`). Both sides are started once for each stage, and take
turns of so many steps, A B B A ..., while the other stands still. Each turn gives the median of its steps, each pair of
turns a ratio, and the table their medians and middle halves.
"""

from __future__ import annotations

import argparse
import functools

from driving.beside import PROGRAMS, SIZES, add_turns, by_paceline, by_torchrun, cells, throughput
from driving.interleaved import Job, interleaved
from driving.options import options_of

PROGRAM = PROGRAMS / "gpt_deepspeed.py"
PACELINE = ("--device", "cpu", "--threads", "1", "--no-tensorboard", "--no-save-at-end")
WORKERS = 2


def deepspeed_command(size: str, stage: int, steps: int, out: str) -> list[str]:
    return by_torchrun(PROGRAM, [*SIZES[size], stage, steps, out, "deepspeed"], workers=WORKERS)


def paceline_command(size: str, stage: int, steps: int, out: str) -> list[str]:
    words = [*SIZES[size], stage, steps, out, "paceline.compat.deepspeed"]
    return by_paceline(PROGRAM, words, workers=WORKERS, out=out, options=PACELINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="0,1,2,3", help="ZeRO stages")
    quick = add_turns(parser) | {"stages": "0"}
    options = options_of(parser, takes="about 15 minutes", quick=quick)
    print("| ZeRO stage | DeepSpeed, ms per step | Paceline, ms per step | throughput, Paceline / DeepSpeed |")
    print("|---|---|---|---|")
    for stage in map(int, options.stages.split(",")):
        commands = [functools.partial(one, options.size, stage) for one in (deepspeed_command, paceline_command)]
        jobs = [Job(command=command, workers=WORKERS) for command in commands]
        theirs, ours = interleaved(jobs, turns=options.turns, block=options.block)
        print(f"| {' | '.join([str(stage), *cells(theirs, ours), throughput(theirs, ours)])} |", flush=True)


if __name__ == "__main__":
    main()
