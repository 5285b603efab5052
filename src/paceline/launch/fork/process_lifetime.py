"""Ties the lifetimes of supervisor, warm parent and workers together with Linux `prctl` calls, and lists processes.

On other systems these functions do nothing; there a process notices the end of another one only by a closed socket.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["become_subreaper", "child_pids", "pids_with_variable", "set_parent_death_signal", "set_process_name"]

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def set_parent_death_signal(signum: int) -> None:
    """Make the kernel send `signum` to this process when its parent ends, or only the parent's thread that forked it.

    If the parent ended before this call, nothing is sent: compare `os.getppid()` afterwards.
    """
    _prctl(PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """Adopt every descendant of this process whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show; the kernel keeps 15 bytes."""
    _prctl(PR_SET_NAME, name.encode()[:15])


def child_pids() -> list[int]:
    """Return the pids of this process's children, adopted ones included; empty if the kernel does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:
        return []


def pids_with_variable(variable: str, value: str) -> list[int]:
    """Return the pids of all processes that were started with this environment variable, including their forks."""
    wanted, found = f"{variable}={value}".encode(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform != "linux":
        return
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
