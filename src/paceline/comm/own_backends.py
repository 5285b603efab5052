"""Makes a process group of ours a back end of torch.distributed, by name, as all versions of torch take it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["add_backend"]


def add_backend(name: str, create: Callable[..., Any]) -> None:
    """Register `create` as the back end `name` for CPU tensors, once. It returns a whole process group.

    From torch 2.15 on, torch's own flight recorder attaches itself to groups of other packages. It needs a back end
    within the group, and ours are groups as a whole, with a recorder of their own.
    """
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
        record_themselves = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
        if record_themselves is not None:
            record_themselves.add(name)
