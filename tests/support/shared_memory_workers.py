"""Real workers that share memory, for tests: forked from the test process, joined by gloo."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.comm.shared_memory.setup import with_shared_memory
from paceline.comm.shared_memory.shared_group import SharedGroup

CPU = torch.device("cpu")
LIMIT_S = 60.0


class Workers:
    """Forked workers; `function(workers, rank)` runs in each, and its values come back."""

    def __init__(self, scratch: Path, num_workers: int, function: Callable[[Workers, int], Any]) -> None:
        self.scratch, self.num_workers = scratch, num_workers
        self.pids = [self._fork(function, rank) for rank in range(num_workers)]

    def join(
        self, rank: int, size: int, *, generation: int = 0, timeout_s: float = LIMIT_S, ranks: Sequence[int] = ()
    ) -> SharedGroup:
        """As a worker: be member `rank` of a group of `size`; messages name its members by `ranks`."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(self.scratch / f"store_{generation}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
        world: Any = dist.group.WORLD  # torch's stub allows None
        group, reason = with_shared_memory(Group(world, device=CPU), timeout_s=timeout_s, ranks=ranks)
        if not isinstance(group, SharedGroup):
            raise RuntimeError(f"no memory is shared: {reason}")
        return group

    def values(self, *, killed: Sequence[int] = ()) -> list[Any]:
        """Wait for all; those that are to be killed must have been, the others must have ended well."""
        deadline = time.monotonic() + LIMIT_S
        statuses: dict[int, int] = {}
        try:
            while len(statuses) < self.num_workers and time.monotonic() < deadline:
                for rank, pid in enumerate(self.pids):
                    if rank not in statuses:
                        done, status = os.waitpid(pid, os.WNOHANG)
                        statuses.update({rank: status} if done else {})
                time.sleep(0.002)
        finally:
            for rank, pid in enumerate(self.pids):
                if rank not in statuses:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        for rank in range(self.num_workers):
            error = self.scratch / f"error_{rank}"
            assert statuses.get(rank) == (signal.SIGKILL if rank in killed else 0), error.exists() and error.read_text()
        return [
            None if rank in killed else torch.load(self.scratch / f"value_{rank}", weights_only=False)
            for rank in range(self.num_workers)
        ]

    def _fork(self, function: Callable[[Workers, int], Any], rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            torch.save(function(self, rank), self.scratch / f"value_{rank}")
            status = 0
        except BaseException:  # the child's boundary: the parent shows it
            (self.scratch / f"error_{rank}").write_text(traceback.format_exc())
        finally:
            os._exit(status)
