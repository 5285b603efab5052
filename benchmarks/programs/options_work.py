"""What one device trains under each Compute option: the example's GPT, its data, and what is measured of it.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT: the last words of both programs. A step is MICROS micro-batches of SAMPLES.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # optimizers import it with their first step, and what comes after `StepTimes()` counts
from measured import Measured
from torch.optim import AdamW
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

__all__ = ["LR", "MICROS", "SAMPLES", "STEPS", "OnDevice", "adamw", "model", "next_byte_loss", "samples"]

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS = map(int, sys.argv[-7:-1])
OUT = sys.argv[-1]
LR = 1e-4


def model() -> GPT:
    torch.manual_seed(1)
    return GPT(WIDTH, LAYERS, HEADS)


def samples() -> TensorDataset:
    text, _ = standard_library()
    return windows(text, STEPS * SAMPLES * MICROS)


def adamw(model: torch.nn.Module, *, on_host: bool = False) -> AdamW:
    """`on_host`: parameters and gradients are kept there."""
    return AdamW(model.parameters(), lr=LR, fused=not on_host)


class OnDevice(Measured):
    """A step ends when the device is done with it; a GPU's memory is what torch has allocated there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_gpu = device.type == "cuda"

    def step(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()
        super().step()
        if self._is_gpu and len(self.took_ms) == int(os.environ.get("PEAK_SINCE_STEP", "0")):
            torch.cuda.reset_peak_memory_stats()

    def end(self, worker_rank: int = 0) -> None:
        """Write OUT.RANK."""
        self.write(OUT, worker_rank)
        if self._is_gpu:
            path = Path(f"{OUT}.{worker_rank}")
            path.write_text(json.dumps({**json.loads(path.read_text()), "peak": torch.cuda.max_memory_allocated()}))
