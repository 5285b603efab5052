"""Finds what a test leaves behind: processes, files in shared memory, threads, folders, a changed environment.

A process belongs to this session when it descends from it, or when it carries the session's mark in its environment:
a worker whose parent has exited has another parent, but keeps the mark. A file in /dev/shm carries no owner: it counts
when it is new and no process of somebody else has it open, so that two sessions on one machine do not accuse each
other. Nor does a folder of runs under faults: it counts where nobody else on the machine runs Paceline or its tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import lasting

__all__ = ["LASTING_PIDS", "MARK", "PROGRAM_MARK", "Snapshot", "left_behind", "take"]

MARK = "PYTEST_SESSION_MARK"  # environment variable, set once by conftest
PROGRAM_MARK = "PROCESS_TEST_MARK"  # environment variable, inherited by every process of one program of a test
SHARED_MEMORY = Path("/dev/shm")
NEWEST = Path("/proc/loadavg")  # its last word is the number of the process that began last
FOLDERS = ("paceline-run-", "paceline-drill-")  # which `run_with` and `paceline drill` leave to their caller
# Started once by libraries, never ended by them: a process by a part of its command line, a thread by its class.
LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LASTING_PIDS = set[
    int
]()  # of processes that serve many tests; a test that starts one registers it, and ends it with the session
LASTING_THREADS = ("GarbageCollectorThread",)  # pyzmq
LASTING_THREAD_NAMES = ("fsspecIO", "asyncio_")  # fsspec's, for all stores of a process: by how their names begin
# pytest's, torch's and DeepSpeed's own
LASTING_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What there is at one moment."""

    processes: frozenset[int]  # pids of the whole machine: whose they are is asked only of new ones
    shared_memory: frozenset[str]
    threads: frozenset[threading.Thread]
    folders: frozenset[Path]
    environment: dict[str, str]


def take() -> Snapshot:
    """What there is now."""
    return Snapshot(
        processes=_pids(),
        shared_memory=_shared_memory(),
        threads=frozenset(threading.enumerate()),
        folders=_folders(),
        environment=_environment(),
    )


def left_behind(before: Snapshot, *, grace_s: float = 20.0) -> list[str]:
    """One line for each thing that is there now, was not there `before`, and does not go away within `grace_s` seconds.

    Processes that were left are killed, the environment is put back: the next test starts clean.
    """
    deadline = time.monotonic() + grace_s
    found = _changed_environment(before)
    found += _left_processes(before, deadline)
    found += _left_threads(before, deadline)
    found += _left_folders(before)
    return found + _left_shared_memory(before, deadline)


_listed: tuple[str, frozenset[int]] = ("", frozenset())  # the newest process on the machine, and all there were


def _pids() -> frozenset[int]:
    """All processes, and perhaps some that have ended: they are listed anew only where one has begun since."""
    global _listed
    newest = NEWEST.read_text().rpartition(" ")[2] if NEWEST.exists() else ""
    if not newest or newest != _listed[0]:
        _listed = newest, frozenset(psutil.pids())
    return _listed[1]


def _is_ours(pid: int) -> bool:
    """Whether a process descends from this one or carries this session's mark."""
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    try:
        if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return True
        return os.getpid() in [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
    except (OSError, psutil.Error):
        return False  # it has ended, or belongs to another user


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LASTING_VARIABLES}


def _changed_environment(before: Snapshot) -> list[str]:
    found = []
    now = _environment()
    for name in sorted(before.environment.keys() | now.keys()):
        old, new = before.environment.get(name), now.get(name)
        if old == new:
            continue
        found.append(f"environment variable {name}: was {old!r}, is {new!r}")
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    return found


def _left_processes(before: Snapshot, deadline: float) -> list[str]:
    pids = [pid for pid in _pids() - before.processes if _is_ours(pid)]
    new = [process for process in _existing(pids) if not _is_lasting(process)]
    _, alive = psutil.wait_procs(new, timeout=max(0.0, deadline - time.monotonic()))
    lines = [f"process {process.pid}: {_command(process)}" for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    return lines


def _existing(pids: list[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _is_lasting(process: psutil.Process) -> bool:
    return process.pid in LASTING_PIDS or any(text in _command(process) for text in LASTING_PROCESSES)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return "(ended)"


def _left_threads(before: Snapshot, deadline: float) -> list[str]:
    lines = []
    for thread in threading.enumerate():
        if thread in before.threads or _is_lasting_thread(thread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            lines.append(f"thread {thread.name}")
    return lines


def _is_lasting_thread(thread: threading.Thread) -> bool:
    return type(thread).__name__ in LASTING_THREADS or thread.name.startswith(LASTING_THREAD_NAMES)


def _left_shared_memory(before: Snapshot, deadline: float) -> list[str]:
    while True:
        new = _shared_memory() - before.shared_memory
        ours = new - _open_elsewhere(new)
        if not ours or time.monotonic() >= deadline:
            return [f"shared memory {SHARED_MEMORY / name}" for name in sorted(ours)]
        time.sleep(0.05)  # nothing tells when a file of another process is unlinked


def _folders() -> frozenset[Path]:
    place = tempfile.gettempdir()
    return frozenset(Path(place, name) for name in os.listdir(place) if name.startswith(FOLDERS))


def _left_folders(before: Snapshot) -> list[str]:
    new = _folders() - before.folders - lasting.folders()
    return [] if not new or _others_are_here() else [f"folder {path}" for path in sorted(new)]


def _others_are_here() -> bool:
    """Whether a process of somebody else is of Paceline or of its tests, and may have made such a folder."""
    return any(
        ("paceline" in _command(process) or "pytest" in _command(process)) and not _is_ours(process.pid)
        for process in psutil.process_iter()
    )


def _open_elsewhere(names: frozenset[str]) -> set[str]:
    """Those of the files in shared memory that a process of somebody else has mapped."""
    if not names:
        return set()
    found: set[str] = set()
    for pid in psutil.pids():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # it has ended, or belongs to another user
        in_use = {name for name in names if f"{SHARED_MEMORY / name}" in maps}
        if in_use and not _is_ours(pid):
            found |= in_use
    return found
