"""Memory and step time with Adam's state in memory and on a disk.

    python benchmarks/offload.py [--path DIR] [--layers 24] [--width 2048] [--steps 5]

The model is an MLP of square layers (100 M parameters by default); each way is a process of its own. *anonymous* is the
memory that only the process can give back, at the largest; *resident* also counts file pages that were mapped at that
moment, which the system may take away. The largest is over the steps after the first and is asked for by a thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from driving.options import options_of

MIB = 1 << 20
BATCH = 16
LOOK_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="processes for each way")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the plan that this process measures
    options = options_of(parser, takes="about 10 minutes", quick={"layers": 2, "width": 256, "steps": 2, "rounds": 1})
    if options.one is not None:
        _measure(options)
        return
    weights = options.layers * options.width**2 * 4
    print(
        f"{weights / 4e6:.1f} M parameters: weights {weights / MIB:.0f} MiB, Adam's state {2 * weights / MIB:.0f} MiB"
    )
    ways = {"in memory": "default", "on a disk": f"compute(offload=optimizer,offload_path={options.path})"}
    print(
        "\n| Adam's state | anonymous, MiB | resident, MiB | median step, s | fastest step, s |\n|---|---|---|---|---|"
    )
    for name, plan in ways.items():
        found = [_run(plan, sys.argv[1:]) for _ in range(options.rounds)]
        anonymous, resident = (max(one[key] for one in found) / MIB for key in ("anonymous", "resident"))
        times = sorted(itertools.chain.from_iterable(one["times"] for one in found))
        print(
            f"| {name} | {anonymous:.0f} | {resident:.0f} | {statistics.median(times):.2f} | {times[0]:.2f} |",
            flush=True,
        )


def _run(plan: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--one", plan]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(options: argparse.Namespace) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline

    def train(worker: paceline.Worker) -> dict[str, Any]:
        before = _sizes()
        layers = [
            nn.Sequential(nn.Linear(options.width, options.width, bias=False), nn.GELU()) for _ in range(options.layers)
        ]
        model = worker.prepare(nn.Sequential(*layers))
        optim = worker.prepare(torch.optim.Adam(model.parameters(), lr=1e-5))
        step = worker.stepper(model, optim, nn.functional.mse_loss)
        x = torch.randn(BATCH * (options.steps + 1), options.width)
        largest: list[int] = [0, 0]
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):
                largest[:] = map(max, largest, _sizes())

        times: list[float] = []
        thread = threading.Thread(target=look)
        for batch in worker.batches(TensorDataset(x, x)):
            if len(times) == 1:
                thread.start()
            began = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - began)
        over.set()
        thread.join()
        return {"anonymous": largest[0] - before[0], "resident": largest[1] - before[1], "times": times[1:]}

    with tempfile.TemporaryDirectory(prefix="paceline-offload-") as run_dir:
        terms = [f"batch(size={BATCH},micro={BATCH})", *([options.one] if options.one != "default" else [])]
        found = paceline.run(
            train,
            workers=1,
            plan="+".join(terms),
            run_dir=run_dir,
            save_at_end=False,
            tensorboard=False,
            threads=1,
        )
    print(json.dumps(found))


def _sizes() -> tuple[int, int]:
    """Bytes of this process: anonymous, all that is resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("Rss", "VmRSS"))}
    return found["RssAnon"], found["VmRSS"]


if __name__ == "__main__":
    main()
