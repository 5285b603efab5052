"""Memory and time of `worker.prepare` of a model whose weights are mapped from a file, two workers, by layout.

    python benchmarks/mapped_weights.py [--width 1024] [--layers 12]

The example's GPT is written to a safetensors file of random numbers. Each worker makes the model on the meta device,
gives it the mapped weights, and prepares it. "Keeps" is what the worker's resident memory has grown by afterwards, and
"peak" what it had grown by at most, by the kernel's VmHWM.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import paceline
from driving.options import options_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT

PLANS = {"replicas=2": 1.0, "shard=2": 0.5, "stages=2": 0.5, "tensor=2": 0.5}  # the share that a worker keeps
HEADS, MIB = 8, 1 << 20


def memory_mib(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def prepared(worker: paceline.Worker, path: str, width: int, layers: int) -> list[tuple[float, float, float]]:
    """Of each worker: MiB that it keeps, MiB at the peak, and seconds."""
    with torch.device("meta"):
        model = GPT(width, layers, HEADS)
    model.load_state_dict(load_file(path), assign=True)
    worker.gather(worker.rank)  # what comes with the first collective is there
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory_mib("VmRSS"), time.perf_counter()
    worker.prepare(model)
    took = time.perf_counter() - began
    return worker.gather((memory_mib("VmRSS") - before, memory_mib("VmHWM") - before, took))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    options = options_of(parser, takes="about two minutes", quick={"width": 256, "layers": 4})
    with tempfile.TemporaryDirectory(prefix="paceline-mapped-") as scratch:
        path = Path(scratch) / "model.safetensors"
        model = GPT(options.width, options.layers, HEADS)
        largest = max(one.nbytes for one in model.parameters()) / MIB
        save_file(model.state_dict(), path)
        size = path.stat().st_size / MIB
        del model
        rows: list[str] = []
        for plan, share in PLANS.items():
            found = paceline.run(
                functools.partial(prepared, path=str(path), width=options.width, layers=options.layers),
                workers=2,
                plan=f"{plan}+batch(size=8,micro=2)",
                run_dir=str(Path(scratch) / plan),
                save_at_end=False,
                tensorboard=False,
                threads=1,
            )
            keeps, peak, took = (max(column) for column in zip(*found, strict=True))
            part = share * size
            ratio = peak / (part + largest)
            rows.append(f"| {plan} | {part:.0f} | {keeps:.0f} | {peak:.0f} | {ratio:.2f} | {took:.1f} |")
    print(f"\n{size:.0f} MiB, the largest tensor {largest:.0f} MiB\n")
    print("| plan | a worker's part, MiB | keeps, MiB | peak, MiB | peak / (part + the largest) | s |")
    print("|---|---:|---:|---:|---:|---:|", *rows, sep="\n")


if __name__ == "__main__":
    main()
