"""Have a program's own `torch.distributed.init_process_group()` join the run: the default process group is the run's.

What such a program reads in its environment is set as torchrun sets it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.errors import PlanError
from paceline.plan.job import Assignment
from paceline.runs.open_worker import open_worker

__all__ = ["prepare_program"]


def prepare_program(assignment: Assignment) -> None:
    """Before the program of this worker begins: set what it reads, and have it join where it makes its process group."""
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.workers),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_workers),
        GROUP_RANK=str(assignment.host_index),
    )
    _replace(dist.init_process_group, _joining(dist.init_process_group, assignment))


def _joining(make: Callable[..., None], assignment: Assignment) -> Callable[..., None]:
    @functools.wraps(make)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized() or sys._getframe(1).f_globals.get("__name__", "").startswith("paceline."):
            make(*args, **kwargs)  # Paceline's own call, or one too many, which torch refuses
            return
        open_worker()
        if not dist.is_initialized():
            raise PlanError(
                f"This run is elastic ({assignment.plan}): workers come and go, so torch has no default process group. "
                "Give a plan with a fixed number, such as --plan replicas=2."
            )

    return init_process_group


def _replace(old: Callable[..., None], new: Callable[..., None]) -> None:
    """Put `new` in the place of torch's `old`, in each module of torch that has its name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
