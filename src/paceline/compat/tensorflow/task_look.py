"""Looks at a program from outside while it runs: what it uses of its host, and where its files for TensorBoard are."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paceline.processes import ProcessUsage, process_usage

__all__ = ["TaskLook", "catches_signal", "event_files", "link_curves"]

EVENT_FILE = re.compile(r"events\.out\.tfevents\.")
MOST_LINKS = 100  # of one task


class TaskLook:
    """What one program has used since the look before."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = ProcessUsage(age_s=0.0, cpu_s=0.0, memory_bytes=0)

    def take(self) -> ProcessUsage | None:
        """Return what it has used: its age and memory now, and the processor time since the look before as a rate over
        its age (`cores`); None where it has ended, or there is no /proc."""
        now = process_usage(self._pid)
        if now is None:
            return None
        passed_s, cpu_s = now.age_s - self._before.age_s, now.cpu_s - self._before.cpu_s
        self._before = now
        rate = cpu_s / passed_s if passed_s > 0 else 0.0
        return ProcessUsage(age_s=now.age_s, cpu_s=rate * now.age_s, memory_bytes=now.memory_bytes)


def event_files(pid: int) -> list[Path]:
    """Return the event files of TensorBoard that a process has open, as TensorFlow keeps them open."""
    found = set[Path]()
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it has ended
        return []
    for entry in entries:
        try:
            path = Path(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            continue
        if EVENT_FILE.search(path.name):
            found.add(path)
    return sorted(found)


def catches_signal(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal now, so that it does not end by it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)


def link_curves(folders: list[Path], tensorboard: Path, task: str) -> None:
    """Have TensorBoard find a program's own folders below the run's: one link to each, named after the task and the
    last part of the folder's name. Raises OSError where they cannot be made."""
    place = tensorboard / "program" / task.replace(" ", "_")
    linked = {Path(os.readlink(link)) for link in place.glob("*") if link.is_symlink()}
    for folder in folders:
        if folder in linked or folder.is_relative_to(tensorboard.absolute()) or len(linked) >= MOST_LINKS:
            continue
        place.mkdir(parents=True, exist_ok=True)
        names = (folder.name if number == 0 else f"{folder.name}_{number}" for number in range(MOST_LINKS + 1))
        link = next(place / name for name in names if not os.path.lexists(place / name))
        link.symlink_to(folder, target_is_directory=True)
        linked.add(folder)
