"""Which devices a pool can share."""

from __future__ import annotations

import os

from paceline.errors import PlanError

__all__ = ["own_slots"]


def own_slots() -> int:
    """Return how many workers this machine has room for, one on each core; PlanError where it has GPUs. A replica's GPU
    is its number on the host, so runs side by side would all take the first ones.
    """
    import torch

    if torch.cuda.is_available():
        raise PlanError(
            "This machine has GPUs, and a pool shares cores: its runs would all use the first GPU. To train on the "
            "processors, hide the GPUs from the pool and from the runs: CUDA_VISIBLE_DEVICES= paceline pool ..."
        )
    return len(os.sched_getaffinity(0))
