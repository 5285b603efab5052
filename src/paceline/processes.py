"""Identifies a process for good, and reads its state.

The system reuses process numbers, so a process is identified by its number and its start time.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path

__all__ = [
    "ProcessUsage",
    "exit_text",
    "how_ended",
    "is_same_process",
    "process_started_s",
    "process_state",
    "process_usage",
    "run_delay_s",
    "this_host",
]

TOLERANCE_S = 0.5  # start times are kept to a hundredth; a number does not come round that quickly


def process_started_s(pid: int) -> float | None:
    """Return when a process of this host began (on Linux: seconds after boot); None for none, or for a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _started_elsewhere(pid)
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def is_same_process(pid: int, started_s: float) -> bool:
    """Say whether the process that had this number and start time still runs on this host."""
    now = process_started_s(pid)
    return now is not None and abs(now - started_s) < TOLERANCE_S


def this_host() -> str:
    """Return this machine's name as run.json keeps it."""
    return socket.gethostname()


def _started_elsewhere(pid: int) -> float | None:
    """The same where there is no /proc (macOS)."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessUsage:
    """What a process has used since it began."""

    age_s: float
    cpu_s: float  # of all its threads
    memory_bytes: int  # resident now

    @property
    def cores(self) -> float:
        """How many cores it has kept busy, on average."""
        return self.cpu_s / self.age_s if self.age_s > 0 else 0.0


def process_usage(pid: int) -> ProcessUsage | None:
    """Return what a process of this host has used; None where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
    cpu_s = (int(fields[11]) + int(fields[12])) / ticks
    return ProcessUsage(age_s=max(0.0, age_s), cpu_s=cpu_s, memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"))


STATES = {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


def run_delay_s(pid: int) -> float | None:
    """Return how long a process's first thread has waited for a CPU since it began; None if unknown."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def process_state(pid: int) -> str:
    """Whether a process of this host is "running", "stopped" (SIGSTOP, a debugger) or "gone"."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "gone" if Path("/proc/self/stat").exists() else "running"
    return STATES.get(text.rpartition(")")[2].split()[0], "running")


def how_ended(pid: int, name: str) -> str:
    """Return how a process of this name (as in /proc/pid/comm) has ended, as `exit_text` does, while its parent has not
    reaped it: whichever process asks. "" if it runs, if there is none, or if the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        said, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if said != name or fields[0] not in "ZX":
            return ""
        return exit_text(os.waitstatus_to_exitcode(int(fields[49])))
    except (OSError, ValueError, IndexError):
        return ""


def exit_text(code: int) -> str:
    """Return "killed by signal 9" or "ended with status 1" for a code as `subprocess` gives it."""
    return f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
