"""Steps of the example's GPT under Paceline, and in a bare loop of torch beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

import paceline
from gpt import GPT, next_byte_loss, standard_library, windows

__all__ = ["Compared", "Size", "Trained", "autocasting", "compared", "timed", "trained"]

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LR = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    width: int
    layers: int
    heads: int
    samples: int  # of a step, which is one micro-batch

    def plan(self, precision: str, **compute: Any) -> str:
        fields = {"precision": precision, **compute}
        options = ",".join(f"{name}={value}" for name, value in fields.items())
        return f"replicas=1+batch(size={self.samples},micro={self.samples})+compute({options})"

    def model(self) -> GPT:
        torch.manual_seed(1)
        return GPT(self.width, self.layers, self.heads)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Throughput of Paceline over that of the loop, median and quartiles of the turns; milliseconds of a step."""

    ratio: float
    low: float
    high: float
    ours_ms: float
    bare_ms: float

    def __str__(self) -> str:
        ratio = f"{self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f})"
        return f"{ratio}; {self.ours_ms:.2f} ms, bare {self.bare_ms:.2f} ms"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    losses: list[float]
    step_ms: float  # median, the first steps left out
    peak_bytes: int  # of what torch has allocated on a GPU; 0 elsewhere


def compared(worker: paceline.Worker, size: Size, turns: int, steps: int) -> Compared:
    """Blocks of steps of both, in turn; a device is done with one before the other begins."""
    device, compute = worker.device, worker.plan.compute
    text, _ = standard_library()
    data = windows(text, (turns + 2) * steps * size.samples)
    net = worker.prepare(size.model())
    optim = worker.prepare(torch.optim.AdamW(net.parameters(), lr=LR, fused=True))
    step = worker.stepper(net, optim, next_byte_loss, clip_norm=1.0)
    batches = worker.batches(data)
    bare = size.model().to(device)
    if compute.compile:
        bare.compile()
    bare_optim = torch.optim.AdamW(bare.parameters(), lr=LR, fused=True)
    loader = iter(DataLoader(data, batch_size=size.samples, shuffle=True, pin_memory=device.type == "cuda"))

    def ours() -> None:
        for batch in itertools.islice(batches, steps):
            worker.report(loss=step(batch))

    def theirs() -> None:
        for x, y in itertools.islice(loader, steps):
            with autocasting(device, compute.precision):
                loss = next_byte_loss(bare(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            bare_optim.step()
            bare_optim.zero_grad()
            loss.item()  # for a log line, as every script has

    for warm in (ours, theirs):
        timed(warm, device)
    pairs = []
    for turn in range(turns):
        first, second = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        took = {one: timed(one, device) for one in (first, second)}
        pairs.append((took[ours], took[theirs]))
    low, middle, high = statistics.quantiles([bare_s / our_s for our_s, bare_s in pairs])
    ours_ms, bare_ms = (1000 * statistics.median(one) / steps for one in zip(*pairs, strict=True))
    return Compared(ratio=middle, low=low, high=high, ours_ms=ours_ms, bare_ms=bare_ms)


def trained(worker: paceline.Worker, size: Size, steps: int) -> Trained:
    """Some steps under the worker's plan."""
    device = worker.device
    text, _ = standard_library()
    net = worker.prepare(size.model())
    on_host = worker.plan.compute.offload == "all"
    optim = worker.prepare(torch.optim.AdamW(net.parameters(), lr=LR, fused=not on_host))
    step = worker.stepper(net, optim, next_byte_loss, clip_norm=1.0)
    losses, took = [], []
    began = time.perf_counter()
    for batch in worker.batches(windows(text, steps * size.samples)):
        losses.append(float(step(batch)))
        _wait_for(device)
        took.append(1000 * (time.perf_counter() - began))
        began = time.perf_counter()
        if len(took) == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Trained(losses=losses, step_ms=statistics.median(took[2:]), peak_bytes=peak)


def timed(do: Callable[[], None], device: torch.device) -> float:
    _wait_for(device)
    began = time.perf_counter()
    do()
    _wait_for(device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def autocasting(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=HALF[precision]) if precision in HALF else contextlib.nullcontext()
