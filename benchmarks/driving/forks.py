"""Workers of a measurement that are forked from it, so that torch is imported once."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["enter", "measured_by"]

CLONE_NEWNET = 0x40000000


def measured_by(count: int, measure: Callable[[int, dist.FileStore], Any]) -> Any:
    """Fork so many workers; return what `measure(rank, store)` gave worker 0. Exits where one of them fails."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found"
        pids: list[int] = []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    found = measure(rank, dist.FileStore(f"{scratch}/store", count))
                    if rank == 0:
                        torch.save(found, out)
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise SystemExit("a worker failed")
        return torch.load(out)


def enter(namespace: str) -> None:
    """Put this thread, and whatever it starts, on a host that is a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
