"""Collectives and bytes of a step under tensor parallelism: Paceline's own plan against the one that is written by
hand.

    python benchmarks/collectives.py [--size demo] [--workers 2,4]

A Llama of the transformers package; by hand: torch's `parallelize_module`, with each block's inputs prepared once.
Nothing is timed, so a busy machine will do.
"""

from __future__ import annotations

import argparse

from driving.options import options_of
from driving.sides import SIZES, Side, said

STEPS = 2  # the second one is counted

Counted = dict[str, list[int]]  # kind -> how often, how many bytes


def count(framework: str, workers: int, size: str) -> Counted:
    """What a worker sends in a step, the same on all."""
    if framework == "torch":
        side = Side(program="count_torch.py", workers=workers)
    else:
        side = Side(program="count_paceline.py", workers=workers, plan=f"replicas=1+tensor={workers}")
    found = said(side, size, STEPS)
    if any(one != found[0] for one in found):
        raise SystemExit(f"the workers of {side.program} do not send the same: {found}")
    return found[0]


def described(counted: Counted) -> str:
    return "; ".join(f"{calls} {kind}, {num_bytes:,} bytes" for kind, (calls, num_bytes) in sorted(counted.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--workers", default="2,4")
    options = options_of(parser, takes="about 2 minutes", quick={"workers": "2", "size": "tiny"})
    print("| workers | Paceline, of layers | by hand | the same | Paceline, besides |")
    print("|---|---|---|---|---|", flush=True)
    for workers in map(int, options.workers.split(",")):
        own, hand = (count(framework, workers, options.size) for framework in ("paceline", "torch"))
        besides = {kind.removeprefix("besides: "): of for kind, of in own.items() if kind.startswith("besides")}
        layers = {kind: of for kind, of in own.items() if not kind.startswith("besides")}
        verdict = "yes" if layers == hand else "**no**"
        print(
            f"| {workers} | {described(layers)} | {described(hand)} | {verdict} | {described(besides) or '-'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
