"""Every wire and way to agree, on workers that share the device: the losses of the same plan on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from device_checks.bench import Bench

STEPS = 6
PLANS = {  # with the relative difference of a loss that rounding at the wire's own steps may make
    "cast(dtype=bf16)": 2e-2,
    "int8": 2e-2,
    "onebit": 5e-2,
    "topk(ratio=0.1)": 2e-2,
    "powersgd(rank=2)": 2e-2,
    "allreduce(op=adasum)": 1e-6,
    "localsgd(every=2)": 1e-6,
    "gossip": 1e-6,
}


def train(worker: paceline.Worker) -> list[float]:
    torch.manual_seed(1)
    model = worker.prepare(
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
    )
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    step = worker.stepper(model, optim, F.cross_entropy)
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in worker.batches(TensorDataset(x, x[:, :8].argmax(1))):
        losses.append(step(batch))
        worker.report(loss=losses[-1])
    return [float(loss) for loss in losses]


def check(bench: Bench) -> None:
    for plan, limit in list(PLANS.items())[:: 1 if bench.on_gpu else 3]:
        asked = f"losses as on the CPU, within {limit:g}"
        with bench.row(f"replicas=2+{plan}", asked=asked):
            text = f"replicas=2+{plan}+batch(size=32,micro=8)"
            on_device = bench.forked(train, text, 2, max_steps=STEPS)
            on_host = bench.forked(train, text, 2, max_steps=STEPS, device="cpu")
            pairs = [
                (a, b)
                for ours, theirs in zip(on_device, on_host, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            ]
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            bench.tell(
                f"replicas=2+{plan}",
                asked=asked,
                measured=f"{worst:.1e} over {len(pairs)} losses",
                verdict=worst <= limit,
            )
