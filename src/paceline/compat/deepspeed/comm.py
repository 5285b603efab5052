"""`deepspeed.init_distributed` and `deepspeed.comm`: torch.distributed, before and after the run is joined.

A program asks for its rank before it says its configuration, and the run's groups depend on that. So until
`initialize` the workers have a process group for themselves alone, which is then replaced by the run's.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import environment
from paceline.compat.deepspeed.arguments import config_in_arguments
from paceline.compat.deepspeed_files.config import read_config
from paceline.errors import PlanError
from paceline.runs.open_worker import open_worker
from paceline.worker.data.random_state import PreservedRandomState
from paceline.worker.program_worker import program_worker

__all__ = ["get_local_rank", "init_distributed", "is_available", "leave_early_group", "world_here"]

EARLY = "early_group"  # a file in the attempt's directory, by which the workers of one host meet
_early: list[bool] = []  # whether the default process group is the early one


def world_here() -> tuple[int, int, int, int]:
    """(rank, workers, local rank, workers of this host) of this process."""
    found = environment.detect()
    if found is None:
        return 0, 1, 0, 1
    return found.worker_rank, found.workers, found.local_rank, found.local_workers


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's default process group of this job's workers; does nothing where there is one.

    The launcher says which workers there are: arguments are taken for compatibility, and do nothing. Workers of one
    host get a group that `initialize` replaces by the run's. On several hosts the run is joined at once. Raises
    PlanError there if its configuration is not among the program's arguments, and the command gives no plan.
    """
    if dist.is_initialized() or program_worker() is not None:
        return
    number, workers, local_rank, local_workers = world_here()
    environment.set_world_names(rank=number, workers=workers, local_rank=local_rank, local_workers=local_workers)
    own = environment.assignment()
    found = environment.detect()
    if own is not None and own.hosts == 1:
        _make_early(dist.FileStore(str(Path(own.worker_dir).parent / EARLY), workers), number, workers, timeout)
    elif own is None and (found is None or workers == 1):
        _make_early(dist.HashStore(), number, workers, timeout)
    elif found is not None and found.source == "torchrun":
        _make_early(None, number, workers, timeout)
    else:
        _join_at_once(workers, has_plan=own is not None and own.plan.whole is not None)


def _make_early(store: dist.Store | None, rank: int, workers: int, timeout: timedelta | None) -> None:
    make = inspect.unwrap(dist.init_process_group)  # torch's own, which joins no run
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timeout or timedelta(seconds=600)
    if store is None:  # torchrun's own
        make(backend, timeout=limit)
    else:
        environment.set_gloo_interface("lo")
        make(backend, store=store, rank=rank, world_size=workers, timeout=limit)
    _early.append(True)


def _join_at_once(workers: int, *, has_plan: bool) -> None:
    path = config_in_arguments(sys.argv[1:])
    if path is None and not has_plan:
        raise PlanError(
            "deepspeed.init_distributed() on several hosts joins the run, and its plan is not known yet: give "
            "--deepspeed_config FILE, or the plan, `paceline run --plan TEXT`, that `paceline plan --from FILE "
            f"--workers {workers}` prints. Or leave this call out: initialize() joins the run."
        )
    with PreservedRandomState():
        open_worker(plan=None if path is None else read_config(path, workers=workers, on_cpu=False).plan)


def leave_early_group() -> None:
    """Make room for the run's own process group; nothing where the default one is no early one. All call it."""
    if _early and dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier()
            inspect.unwrap(dist.destroy_process_group)()
    _early.clear()


def is_available() -> bool:
    """Whether torch has its distributed package."""
    return dist.is_available()


def get_local_rank() -> int:
    """The number of this worker on its host."""
    return world_here()[2]


def __getattr__(name: str) -> Any:
    """All else is torch.distributed's: get_rank, all_reduce, barrier, ReduceOp, ..."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"deepspeed.comm.{name} is not here, nor has torch.distributed such a name") from None
