"""What one worker's device can do: products by precision, fused attention, memory, single operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["attention_rate", "launch_s", "matmul_rates", "memory_bandwidth", "train_once"]

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL, LARGE = 1024, 8192  # sides of the matrices on a CPU, and on an accelerator
SMALL_FP16 = 256  # on a CPU, where a product in fp16 may take 80 times as long as in fp32
LEAST_RUNS = 3


def train_once(device: torch.device) -> None:
    """Take one step of a tiny model, so that what torch loads for any training is in memory."""
    model = nn.Linear(8, 8, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8, device=device)).sum().backward()
    optimizer.step()


def matmul_rates(device: torch.device, *, seconds: float) -> dict[str, float]:
    """Return operations per second of a large matrix product, by precision; each takes about `seconds`."""
    found: dict[str, float] = {}
    for name, dtype in PRECISIONS.items():
        side = LARGE if device.type != "cpu" else SMALL_FP16 if name == "fp16" else SMALL
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        found[name] = 2.0 * side**3 / _median_s(lambda left=left, right=right: left @ right, device, seconds)
    return found


def memory_bandwidth(device: torch.device, *, seconds: float) -> float:
    """Return bytes per second, read and written, of a copy that no cache holds."""
    source = torch.zeros((1 << 26) if device.type == "cpu" else (1 << 29), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median_s(lambda: target.copy_(source), device, seconds)


def attention_rate(device: torch.device, *, seconds: float) -> float:
    """Return operations per second of fused causal attention in forward and backward, head size 128."""
    tokens, heads, dtype = (512, 4, torch.float32) if device.type == "cpu" else (4096, 16, torch.bfloat16)
    query, key, value = (
        torch.randn(1, heads, tokens, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def both() -> Tensor:
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result.backward(result.detach())
        return result

    needed = 4.0 * tokens * tokens * heads * 128 / 2
    return 3.5 * needed / _median_s(both, device, seconds)  # backward computes scores again: 2.5 times forward


def launch_s(device: torch.device, *, seconds: float) -> float:
    """Return seconds of one operation on eight elements: what Python and torch take to start it."""
    small = torch.zeros(8, device=device)

    def hundred() -> None:
        for _ in range(100):
            small.add_(1.0)

    return _median_s(hundred, device, seconds) / 100


def _median_s(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of a call, of as many as go into `seconds`, after one that does not count."""

    def once() -> float:
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    once()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < LEAST_RUNS or time.perf_counter() < until:
        times.append(once())
    return statistics.median(times)
