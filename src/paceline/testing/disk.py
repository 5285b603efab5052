"""The disk of a run's checkpoints, as a small file system that can be filled; and a torn checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import read_commit_marker
from paceline.errors import CheckpointError

__all__ = ["Disk", "complete", "mounted", "tear"]

TRIES = 20  # of making a disk as small as what is on it


class Disk:
    """A file system in memory, at `place`."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def fill(self) -> None:
        """From now on there is no room for another byte."""
        for left in reversed(range(TRIES)):
            found = os.statvfs(self._place)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            try:
                self._resize(str(max(used, found.f_frsize)))
                return
            except subprocess.CalledProcessError:  # meanwhile the run has written: it holds more than that
                if not left:
                    raise

    def empty(self) -> None:
        """There is room again."""
        self._resize("50%")

    def _resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self._place], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[Disk | None]:
    """Mount a file system at `place`, and leave its files there afterwards; None where that is not allowed."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "paceline", place], capture_output=True)
        yield None if done.returncode else Disk(place)
    finally:
        if place.is_mount():  # also where a signal came as it was mounted
            kept = place.with_name(f"{place.name}.kept")
            shutil.copytree(place, kept)
            subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)
            shutil.rmtree(place)
            kept.rename(place)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    found: list[tuple[int, Path]] = []
    for path in directory.glob("step_*"):
        with contextlib.suppress(CheckpointError):
            found.append((read_commit_marker(path).step, path))
    return [path for _, path in sorted(found)]


def tear(checkpoint: Path) -> Path:
    """Cut a checkpoint's largest file in half, as a power failure leaves what was not on the disk yet; returns it."""
    path = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)
    return path
