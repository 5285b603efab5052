"""How much memory this host allows its processes, whether the kernel has just killed one for want of it, and how busy
its cores are.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal as signals
from pathlib import Path

__all__ = [
    "free_bytes",
    "give_back_freed",
    "is_out_of_memory",
    "lacks_memory",
    "machine_load",
    "memory_limit_bytes",
    "oom_kills",
    "oom_kills_here",
    "oom_likely",
]

NEAR_LIMIT = 0.9  # of the limit: with this peak a SIGKILL from elsewhere is put down to memory
ROOT = Path("/")
REFUSED = re.compile(  # how Python, libc, the dynamic loader, C++ and OpenBLAS say that they got none
    r"\bMemoryError\b|[Cc]annot allocate memory|failed to map segment|\bbad_alloc\b|Memory allocation still failed"
)

NO_TENSOR = re.compile(  # torch's allocators of the CPU and of devices, and the libraries that it calls
    r"can't allocate memory|out of memory|bad_alloc|bad allocation|not enough memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
IN_LOADER = "Caught "  # how torch begins an error of a loader's process, which has memory of its own


def lacks_memory(output: str) -> bool:
    """Say whether a process that ended with these words was refused memory, by a limit or by the machine."""
    return REFUSED.search(output) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error of this process is that it got no memory, on the host or on a device."""
    text = str(error)
    if text.startswith(IN_LOADER):
        return False
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_TENSOR.search(text) is not None)


def oom_likely(
    signal: int | None,
    *,
    peak_memory_bytes: int | None,
    memory_limit_bytes: int | None,
    oom_kills_before: int | None,
    oom_kills_after: int | None,
) -> bool:
    """Say whether a worker that was killed by `signal` (not ours) probably ran out of memory.

    The kernel's counter of such kills is believed first; a peak near the limit is the second sign.
    """
    if signal != signals.SIGKILL:
        return False
    if oom_kills_before is not None and oom_kills_after is not None and oom_kills_after > oom_kills_before:
        return True
    return bool(peak_memory_bytes and memory_limit_bytes and peak_memory_bytes >= NEAR_LIMIT * memory_limit_bytes)


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the least of the machine's memory and the limits of this process's control groups; None if unknown.

    `root` is where `proc` and `sys` are found; tests build their own.
    """
    limits = [limit for limit in (_total(root), *(_limit(group) for group in _groups(root))) if limit is not None]
    return min(limits, default=None)


def free_bytes(root: Path = ROOT) -> int | None:
    """Return how much memory this process can still get, by the machine and its control groups; None if unknown.

    What the kernel keeps of files, and would give up, counts as free.
    """
    kilobytes = _field(root / "proc/meminfo", "MemAvailable:")
    found = [] if kilobytes is None else [kilobytes * 1024]
    for group in _groups(root):
        limit, used = _limit(group), _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            files = _field(group / "memory.stat", "inactive_file") or _field(
                group / "memory.stat", "total_inactive_file"
            )
            found.append(max(0, limit - used + (files or 0)))
    return min(found, default=None)


def oom_kills(root: Path = ROOT) -> int | None:
    """Return how many processes the kernel has killed for memory, here and machine-wide; None if unknown."""
    counts = [_field(root / "proc/vmstat", "oom_kill")]
    for group in _groups(root):
        counts += [_field(group / "memory.events", "oom_kill"), _field(group / "memory.oom_control", "oom_kill")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def oom_kills_here(root: Path = ROOT) -> int | None:
    """Return how many processes the kernel has killed for memory in this process's control group and below; on the
    whole machine where no group counts them; None if unknown.
    """
    for group in _groups(root):
        for name in ("memory.events", "memory.oom_control"):
            count = _field(group / name, "oom_kill")
            if count is not None:
                return count
    return _field(root / "proc/vmstat", "oom_kill")


def _groups(root: Path) -> list[Path]:
    """The directories of this process's memory control groups, from its own to the top; v1 and v2."""
    groups: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        # Inside a container this may name a place outside of what is mounted: then only its parents are.
        place = top / path.strip("/")
        groups += [group for group in (place, *place.parents) if group.is_relative_to(top) and group.is_dir()]
    return groups


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group / name).strip()
        if text.isdigit() and int(text) < 1 << 60:  # v1 writes about 2**63 for "no limit", v2 writes "max"
            return int(text)
    return None


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _total(root: Path) -> int | None:
    kilobytes = _field(root / "proc/meminfo", "MemTotal:")
    return None if kilobytes is None else kilobytes * 1024


def _field(path: Path, name: str) -> int | None:
    """The number behind a name in a file of "name number" lines."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # not this kind of kernel, or not allowed to look: the value is unknown
        return ""


def machine_load() -> float:
    """How many processes want each core of this machine, over the last minute; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, os.getloadavg()[0] / cores)


def give_back_freed() -> None:
    """Have the C library return freed memory to the system: of large blocks between small ones it keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries return it by themselves
        trim(0)
