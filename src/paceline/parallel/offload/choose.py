"""Which memory a plan's offload means on a device, and where it would gain nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.errors import PlanError
from paceline.parallel.offload.memory import HostMemory, MappedMemory, Memory
from paceline.plan import Compute

__all__ = ["memory_for", "refuse_useless", "why_no_disk"]

MOUNTS = Path("/proc/mounts")
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def refuse_useless(compute: Compute, device: torch.device) -> None:
    """Raise PlanError where what is offloaded would stay in the memory that it is to leave."""
    if compute.offload == "none" or device.type != "cpu":
        return
    if compute.offload == "all":
        raise PlanError(
            "Compute(offload='all') keeps parameters and gradients in the host's memory, and this worker computes on "
            "the CPU, in that memory: nothing would be gained. Use Compute(offload='optimizer', offload_path=...), "
            "which keeps the optimizer's state on a disk, or Layout(shard=n) over several hosts."
        )
    if compute.offload_path is None:
        raise PlanError(
            "Compute(offload='optimizer') keeps the optimizer's state in the host's memory, and this worker computes "
            "on the CPU, in that memory: nothing would be gained. Add offload_path='/a/fast/disk', which keeps the "
            "state in files there, or use offload='none'."
        )


def directory_of(compute: Compute) -> Path | None:
    """Return where files are to be kept; None: nothing is kept in files."""
    return None if compute.offload_path is None else Path(compute.offload_path).expanduser()


def memory_for(compute: Compute) -> Memory:
    """Return where an optimizer's state is to be kept. Raises PlanError where the path cannot be used."""
    directory = directory_of(compute)
    return HostMemory() if directory is None else MappedMemory(directory)


def why_no_disk(compute: Compute) -> str | None:
    """Say that the path is in memory, where it is, and what to do."""
    directory = directory_of(compute)
    if directory is None or not MOUNTS.exists():
        return None
    path = directory.resolve()
    mounts = [line.split()[1:3] for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    around = [(len(where), kind) for where, kind in mounts if path.is_relative_to(where.replace("\\040", " "))]
    kind = max(around, default=(0, ""))[1]
    if kind not in IN_MEMORY:
        return None
    return (
        f"offload_path {compute.offload_path} is on a {kind}, which is memory: the optimizer's state leaves this "
        "process, but not this host's memory. Name a directory on a disk"
    )
