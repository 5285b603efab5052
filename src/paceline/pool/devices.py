"""What a host offers to a pool: its cores, or its GPUs."""

from __future__ import annotations

import dataclasses
import os

from paceline import environment
from paceline.errors import PlanError

__all__ = ["NodeOffer", "own_offer"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodeOffer:
    """How many workers run at the same time (`slots`) on how many cores; `gpus`: one for each worker, as
    CUDA_VISIBLE_DEVICES names them, or None where there are none.
    """

    slots: int
    cores: int
    gpus: tuple[str, ...] | None = None


def own_offer(slots: int | None = None) -> NodeOffer:
    """Return what this host offers: a worker for each GPU, or without any for each core; `slots` where it is given.

    GPUs are those that this process sees: CUDA_VISIBLE_DEVICES chooses, and an empty one hides them all. PlanError
    where `slots` is below 1, or above the GPUs.
    """
    cores, gpus = len(os.sched_getaffinity(0)), _own_gpus()
    if slots is not None and slots < 1:
        raise PlanError(f"--slots is {slots}; it must be at least 1.")
    if gpus and slots is not None and slots > len(gpus):
        raise PlanError(
            f"--slots is {slots}, and this host has {len(gpus)} GPUs, one for each worker: give at most {len(gpus)}. "
            "To train on the processors, hide the GPUs: CUDA_VISIBLE_DEVICES= paceline pool ..."
        )
    if gpus:
        return NodeOffer(slots=slots or len(gpus), cores=cores, gpus=gpus[:slots])
    return NodeOffer(slots=slots or cores, cores=cores)


def _own_gpus() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    names = environment.visible_gpus()
    return tuple(map(str, range(count))) if names is None else names[:count]
