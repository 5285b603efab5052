"""Step time, state and traffic of optimizers that look at whole parameters, where workers hold parts of them.

    python benchmarks/owner_steps.py [--layers 8] [--width 256] [--steps 6]

The model is an MLP of square layers. Muon steps all of its matrices; AdamW, which treats each number by itself, is
beside it. *state* is that of the optimizer on the worker that has most of it; *sent* is what all workers together send
in a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from driving.options import options_of

MIB = 1 << 20
BATCH = 64
WAYS = {"default": 1, "replicas=2": 2, "shard=2": 2, "tensor=2": 2, "shard=2+tensor=2": 4, "shard=4": 4}  # workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    # The optimizer and the plan that this process measures.
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = options_of(parser, takes="about 3 minutes", quick={"layers": 2, "width": 64, "steps": 2})
    if options.one is not None:
        _measure(options)
        return
    print(f"{options.layers * options.width**2 / 1e6:.1f} M parameters\n")
    print("| optimizer | plan | median step, s | state, MiB | sent, MiB a step |\n|---|---|---|---|---|")
    for optimizer in ("Muon", "AdamW"):
        for plan in WAYS:
            found = _run(optimizer, plan, sys.argv[1:])
            print(
                f"| {optimizer} | `{plan}` | {found['seconds']:.3f} | {found['state'] / MIB:.1f} | "
                f"{found['sent'] / MIB:.1f} |",
                flush=True,
            )


def _run(optimizer: str, plan: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--one", optimizer, plan]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(options: argparse.Namespace) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import paceline
    from paceline.comm.sharded_tensors import local_part
    from paceline.plan import Plan

    name, text = options.one

    def train(worker: paceline.Worker) -> dict[str, Any]:
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(options.width, options.width, bias=False), nn.GELU()) for _ in range(options.layers)
        ]
        model = worker.prepare(nn.Sequential(*layers))
        kinds: dict[str, Any] = {"Muon": torch.optim.Muon, "AdamW": torch.optim.AdamW}
        optim = worker.prepare(kinds[name](model.parameters(), lr=1e-4))
        step = worker.stepper(model, optim, nn.functional.mse_loss)
        x = torch.randn(BATCH * (options.steps + 1), options.width)
        times: list[float] = []
        for batch in worker.batches(TensorDataset(x, x)):
            began = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - began)
        kept = [local_part(one) for values in optim.state.values() for one in values.values() if torch.is_tensor(one)]
        return {"seconds": statistics.median(times[1:]), "state": sum(one.nbytes for one in kept)}

    plan = Plan.parse(f"{'' if text == 'default' else f'{text}+'}batch(size={BATCH},micro={BATCH // 4})")
    with tempfile.TemporaryDirectory(prefix="paceline-owners-") as run_dir:
        found = paceline.run(
            train,
            workers=WAYS[text],
            plan=plan,
            run_dir=run_dir,
            save_at_end=False,
            tensorboard=False,
            threads=1,
        )
        summary = json.loads((Path(run_dir) / "summary.json").read_text())
    print(json.dumps({**found, "sent": summary["num_bytes_sent"] / (options.steps + 1)}))


if __name__ == "__main__":
    main()
