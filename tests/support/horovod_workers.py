"""Real workers that use Horovod's operations, for tests: forked from the test process, in one run of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from paceline.comm.peer_sockets.process_group import listen_at
from paceline.compat.horovod import basics
from paceline.plan.job import Assignment, Job
from paceline.worker import program_worker
from paceline.worker.program_worker import ProgramPlace
from shared_memory_workers import LIMIT_S, Workers

__all__ = ["start"]


def start(
    scratch: Path, num_workers: int, function: Callable[[int, int], Any], *, timeout_s: float = LIMIT_S
) -> Workers:
    """Start workers that call `function(rank, size)` where Horovod programs call `hvd.init()`."""
    scratch.mkdir(parents=True, exist_ok=True)

    def work(workers: Workers, rank: int) -> Any:
        place = ProgramPlace(
            assignment=_assignment(scratch, rank, num_workers),
            job=Job(timeout_s=timeout_s),
            shared=dist.FileStore(str(workers.scratch / "store"), num_workers),
            recorder=mock.Mock(),
            emit=lambda event: None,
            group=mock.Mock(),
            consensus=mock.Mock(elastic=None, planned=None, finish=None, generation=0),
            allow_restart=lambda: None,
        )
        torch.set_num_threads(1)
        listen_at(None)
        program_worker._places[:] = [place]
        mock.patch.object(basics, "open_worker").start()  # the place is there already
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        return function(rank, num_workers)

    return Workers(scratch, num_workers, work)


def _assignment(scratch: Path, rank: int, workers: int) -> Assignment:
    return Assignment(
        rank=rank,
        workers=workers,
        local_rank=rank,
        local_workers=workers,
        host="here",
        host_index=0,
        hosts=1,
        address="127.0.0.1",
        run_dir=str(scratch),
        attempt=1,
        worker_dir=str(scratch / f"worker_{rank}"),
        channel_fd=-1,
        command_started=time.time(),
        job=Job(),
    )
