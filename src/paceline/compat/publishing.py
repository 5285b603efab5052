"""Puts checkpoints of the run where a program wants them: by links where that is possible, else by copies."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import (
    COMMIT_MARKER,
    candidates,
    is_whole,
    partial_path,
    publish,
    read_commit_marker,
    remove,
    step_of,
    whole_file,
)
from paceline.checkpoint.retention import tidy
from paceline.errors import CheckpointError

__all__ = ["fill_directory", "publish_checkpoint"]


def publish_checkpoint(source: Path, folder: Path, *, beside: Mapping[str, bytes]) -> Path:
    """Copy a complete checkpoint, with files of the program beside its own, into a folder; returns its path there.

    From the first call on the folder has a whole copy at every instant, which `checkpoint_dir.find` finds: older ones
    go when the new one is in its place. What is no checkpoint stays. Raises CheckpointError where such a thing has the
    checkpoint's name, and OSError where a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / source.name
    if os.path.lexists(final) and not is_whole(final):
        raise CheckpointError(f"{final} is there, and is no complete checkpoint: move it away")
    tidy(folder)
    partial = partial_path(folder, step_of(source))
    for name, content in beside.items():
        with whole_file(partial / name) as file:
            file.write(content)
    shutil.copytree(source, partial, copy_function=_link, dirs_exist_ok=True)
    publish(partial)
    for path in candidates(folder):
        if path != final and is_whole(path):
            remove(path)
    return final


def fill_directory(source: Path, directory: Path) -> None:
    """Make a directory a copy of a complete checkpoint, in place of one that it was; its other files stay.

    It is no checkpoint until all files are there. Raises CheckpointError where the source is not complete, and OSError.
    """
    mark = read_commit_marker(source)
    directory.mkdir(parents=True, exist_ok=True)
    # Without its marker a directory is no checkpoint: it goes first, and comes last.
    (directory / COMMIT_MARKER).unlink(missing_ok=True)
    for name in [*mark.files, COMMIT_MARKER]:
        (directory / name).unlink(missing_ok=True)
        _link(str(source / name), str(directory / name))


def _link(source: str, target: str) -> None:
    """A complete checkpoint's files never change: where the disk is the same they need no second copy."""
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
