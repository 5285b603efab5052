"""Throughput and memory of one worker under each Compute option, beside a bare loop of torch with the same model.

    python benchmarks/compute_options.py [--size 1b|tiny] [--device cuda|cpu] [--precision bf16] [--turns 8] [--block 6]
                                         [--recompute none,blocks,selective] [--offload none,optimizer,all]
                                         [--compile false,true]

"1b" is the example's GPT with a billion parameters, "tiny" tries the program itself. The bare loop has autocast,
`torch.utils.checkpoint` around each block ("selective" keeps products and attention) and `Module.compile`, each where
the row says so. It has no equal of offload: those rows stand beside a loop that keeps everything on the device. Both
are started together and take turns of so many steps, A B B A ..., while the other one stands still: so the device needs
room for both. Memory is of runs by themselves, from the third step on: on a GPU what torch has allocated there at most,
elsewhere what the process has added to Python and torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile

import torch

from driving.interleaved import interleaved
from driving.options import options_of
from driving.sides import Side, job_of, peak_bytes

MIB = 1 << 20
STEPS = 6  # of a run whose memory is measured
HEADS = [
    "recompute",
    "offload",
    "compile",
    "Paceline, ms per step",
    "bare loop, ms per step",
    "throughput, Paceline / bare",
    "Paceline, MiB",
    "bare loop, MiB",
    "memory, Paceline / bare",
]


def sides(options: argparse.Namespace, recompute: str, offload: str, compiled: str, path: str) -> tuple[Side, Side]:
    """Return Paceline's side and the bare one."""
    fields = {"precision": options.precision, "recompute": recompute, "offload": offload, "compile": compiled}
    if offload == "optimizer" and options.device == "cpu":  # whose memory is the host's
        fields["offload_path"] = path
    plan = f"replicas=1+compute({','.join(f'{key}={value}' for key, value in fields.items())})"
    words = (options.device, options.precision, recompute, compiled)
    return (
        Side(program="options_paceline.py", workers=1, plan=plan, words=(options.device,)),
        Side(program="options_bare.py", workers=1, words=words),
    )


def peak(side: Side, size: str) -> int | None:
    """The most memory of a run by itself; None: the device has not as much."""
    try:
        return peak_bytes(side, size, STEPS)
    except SystemExit as error:
        if "OutOfMemory" not in str(error):
            raise
        return None


def row(ours: Side, bare: Side, options: argparse.Namespace) -> list[str]:
    """Return the measured cells of a row."""
    peaks = [peak(side, options.size) for side in (ours, bare)]
    told = ["out of memory" if one is None else f"{one / MIB:.0f}" for one in peaks]
    if peaks[0] is None or peaks[1] is None:
        return ["", "", "", *told, ""]
    jobs = [job_of(side, options.size) for side in (ours, bare)]
    took = interleaved(jobs, turns=options.turns, block=options.block)
    low, middle, high = statistics.quantiles(b / a for a, b in zip(*took, strict=True))
    each = [f"{statistics.median(one):.1f}" for one in took]
    return [*each, f"**{middle:.3f}x** ({low:.3f}x to {high:.3f}x)", *told, f"{peaks[0] / peaks[1]:.2f}"]


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--size", choices=["1b", "tiny"], default="1b" if has_gpu else "tiny")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--recompute", default="none,blocks,selective")
    parser.add_argument("--offload", default="none,optimizer,all")
    parser.add_argument("--compile", default="false,true")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--block", type=int, default=6, help="steps of a turn")
    options = options_of(
        parser,
        takes="about 20 minutes",
        quick={"recompute": "none", "offload": "none", "compile": "false", "turns": 2, "block": 3},
    )
    offloads = options.offload.split(",")
    if options.device == "cpu" and "all" in offloads:
        offloads.remove("all")
        print("offload=all is left out: on the CPU the host's memory is the device's, so Paceline refuses it\n")
    print(f"{options.size}, {options.precision}, {options.device}, torch {torch.__version__}\n")
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="paceline-options-") as path:
        for way in itertools.product(options.recompute.split(","), offloads, options.compile.split(",")):
            ours, bare = sides(options, *way, path=path)
            print(f"| {' | '.join([*way, *row(ours, bare, options)])} |", flush=True)


if __name__ == "__main__":
    main()
