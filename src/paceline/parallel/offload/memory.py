"""Memory for tensors that are not with the device that computes: the host's, or files mapped into it.

A file has no name from the start, so the system takes it back when the process ends, however it does; and all of its
blocks are allocated before anything is written to it, so a full disk is an error then and not a signal later.

What was touched of a mapped file counts as the process's memory (RSS) until it is *released*: then it belongs to the
system's page cache, which writes it out when it has time, and frees it when memory is needed.

Which memory a plan's offload means on a device, and where it would gain nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.plan import Compute
from paceline.units import bytes_text

__all__ = [
    "HostMemory",
    "MappedMemory",
    "OffloadMemory",
    "memory_for",
    "refuse_useless",
    "room_for",
    "why_no_disk",
]

EXTENT_BYTES = 64 << 20  # the least that is added where more is needed than was reserved


class OffloadMemory(Protocol):
    """Where tensors are kept."""

    def reserve(self, num_bytes: int) -> None:
        """Make sure of room for so many bytes. Raises PlanError."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, type and order of elements, on the CPU; its values are undefined."""
        ...

    def release(self, tensors: Iterable[Tensor]) -> None:
        """These tensors are not needed for a while; their values stay."""

    def release_all(self) -> None:
        """None of the tensors is needed for a while."""


class HostMemory:
    """The host's memory, pinned where there is a GPU to copy to and from."""

    def reserve(self, num_bytes: int) -> None:
        pass  # what is missing is reported where it is read

    def empty_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())

    def release(self, tensors: Iterable[Tensor]) -> None:
        pass

    def release_all(self) -> None:
        pass


@dataclasses.dataclass(slots=True)
class _Extent:
    """One file, all of it mapped."""

    mapped: mmap.mmap
    address: int
    num_bytes: int
    filled: int = 0  # bytes that were given away


class MappedMemory:
    """Files without a name in a directory. Memory is never given back before the last tensor in it is gone."""

    def __init__(self, directory: Path) -> None:
        """The directory is made where it is not there. Raises PlanError where it cannot be used."""
        self._directory = directory
        self._extents: list[_Extent] = []
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error, 0) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the disk that are taken."""
        return sum(extent.num_bytes for extent in self._extents)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > 0:
            self._extents.append(self._extent(num_bytes))

    def empty_like(self, tensor: Tensor) -> Tensor:
        needed = room_for(tensor)
        fitting = (one for one in self._extents if one.num_bytes - one.filled >= needed)
        extent = next(fitting, None)
        if extent is None:
            extent = self._extent(max(needed, EXTENT_BYTES))
            self._extents.append(extent)
        start, extent.filled = extent.filled, extent.filled + needed
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        flat = torch.frombuffer(extent.mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return flat.as_strided(tensor.size(), torch.empty_like(tensor, device="meta").stride())  # dense, as it lies

    def release(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            begin, num_bytes = tensor.data_ptr(), tensor.nbytes
            extent = self._holding(begin)
            if extent is not None and num_bytes:
                first = (begin - extent.address) // mmap.PAGESIZE * mmap.PAGESIZE
                stop = min(begin - extent.address + num_bytes, extent.num_bytes)
                extent.mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def release_all(self) -> None:
        for extent in self._extents:
            extent.mapped.madvise(mmap.MADV_DONTNEED)

    def _holding(self, address: int) -> _Extent | None:
        """The extent that an address is in; extents are few, but by address in no order."""
        ordered = sorted(self._extents, key=lambda extent: extent.address)
        place = bisect.bisect_right([extent.address for extent in ordered], address) - 1
        found = ordered[place] if place >= 0 else None
        return found if found is not None and address < found.address + found.num_bytes else None

    def _extent(self, num_bytes: int) -> _Extent:
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="paceline_") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                mapped = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise self._refused(error, num_bytes) from error
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        return _Extent(mapped, address, num_bytes)

    def _refused(self, error: OSError, num_bytes: int) -> PlanError:
        what = f"Compute.offload_path is {str(self._directory)!r}, which"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = bytes_text(shutil.disk_usage(self._directory).free)
            return PlanError(
                f"{what} has {free} free for this user, and this worker's optimizer state takes "
                f"{bytes_text(num_bytes)} more. Free space there, name a larger disk, or use Layout(shard=n) over "
                "several hosts, which splits the state."
            )
        return PlanError(f"{what} cannot be used: {error.strerror}. Name a directory that this user may write to.")


def room_for(tensor: Tensor) -> int:
    """Bytes that a tensor takes in mapped memory: whole pages, so that it can be released alone."""
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


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


def memory_for(compute: Compute) -> OffloadMemory:
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
