"""What workers of tests inherit from what they are forked from: imports, made once, and a collector that comes seldom.

Each worker would pay for it again, and of those there are thousands: a sharded one that saves spends more time on
imports than on its steps.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

__all__ = ["collect_seldom", "import_all"]

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
ROOMS = ("checkpoint", "codec", "comm", "elastic", "parallel", "schedule", "sync", "worker")  # all that is in them


def collect_seldom() -> None:
    """Have the collector look for cycles less often here and in all forks: it took a fifteenth of the suite's time."""
    gc.set_threshold(20_000, 20, 20)


def import_all() -> None:
    import torch

    for name in LATE:
        importlib.import_module(name)
    for room in ROOMS:
        package = importlib.import_module(f"paceline.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # the first optimizer imports nearly as much as torch does
