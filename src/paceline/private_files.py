"""Directories and files of a run that other users of the host must not read or write."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from paceline.errors import LaunchError

__all__ = ["make_run_directory", "read_private", "replace_private", "write_private"]


def make_run_directory(run_dir: Path | str) -> None:
    """Make a run's directory, readable by this user alone; one that exists keeps its mode. Raises OSError.

    Logs, checkpoints and the pickled function of `paceline.run(fn)` lie in it.
    """
    run_dir = Path(run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only this user may read or write, also where the directory is open to others."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def replace_private(path: Path, data: bytes) -> None:
    """Write a file as `write_private` does, in one step, where processes of other hosts may write the same one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_private(temporary, data)
    temporary.replace(path)


def read_private(path: Path) -> bytes:
    """Read a file that `write_private` made. Raises OSError, and LaunchError where another user has put one in its
    place, as may happen in a directory to which others may write."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        if owner != os.getuid():
            with tempfile.TemporaryFile(dir=path.parent) as own:  # some network disks give root's files to nobody
                expected = os.fstat(own.fileno()).st_uid
            if owner != expected:
                raise LaunchError(
                    f"{path} belongs to user {owner}, not to this run's user: nothing in it was read. Use a run "
                    "directory in which no other user may write"
                )
        return file.read()
