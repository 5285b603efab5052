"""What workers of tests inherit from what they are forked from: imports, made once, and a collector that comes seldom.

Each worker would pay for it again, and of those there are thousands: a sharded one that saves spends more time on
imports than on its steps.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
from typing import Any

__all__ = ["Later", "collect_seldom", "import_all", "spare_the_collector"]

LATE = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "psutil",
    "safetensors.torch",
    "zmq",
)
MANY = 100  # modules
_frozen_modules = 0
ROOMS = ("checkpoint", "codec", "comm", "elastic", "parallel", "schedule", "sync", "worker")  # all that is in them


class Later:
    """A module that is imported when something of it is first asked for, not when tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks all that is in a file of tests whether it is one
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def collect_seldom() -> None:
    """Have the collector look for cycles less often here and in all forks: it took a fifteenth of the suite's time."""
    gc.set_threshold(20_000, 20, 20)


def spare_the_collector() -> None:
    """Take what was imported out of what the collector looks through: a full collection took 0.3 s, and finding how to
    split a model has several."""
    global _frozen_modules
    if len(sys.modules) - _frozen_modules >= MANY:
        _frozen_modules = len(sys.modules)
        gc.freeze()


def import_all() -> None:
    import torch

    for name in LATE:
        importlib.import_module(name)
    for room in ROOMS:
        package = importlib.import_module(f"paceline.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # the first optimizer imports nearly as much as torch does
