"""Directories and files of a run that other users of the host must not read or write."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from paceline.errors import LaunchError, PlanError

__all__ = ["make_own_directory", "make_run_directory", "read_private", "replace_private", "write_private"]


def make_run_directory(run_dir: Path | str) -> None:
    """Make a run's directory, readable by this user alone; one that exists keeps its mode. Raises OSError.

    Logs, checkpoints and the pickled function of `paceline.run(fn)` lie in it.
    """
    run_dir = Path(run_dir)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.mkdir(mode=0o700, exist_ok=True)


def make_own_directory(folder: Path) -> None:
    """Make a directory whose files say what is started, as `make_run_directory` does.

    Raises PlanError where another user may put files into it, and OSError.
    """
    make_run_directory(folder)
    found = folder.stat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PlanError(
            f"Other users may write to {folder} (mode {stat.S_IMODE(found.st_mode):04o}), and what lies there is "
            f"started as you. Close it (chmod go-w {folder}), after a look at what is in it, or use another folder."
        )
    if found.st_uid != os.getuid() and found.st_uid != _owner_of_new_files(folder):
        raise PlanError(
            f"{folder} belongs to user {found.st_uid}, not to you (user {os.getuid()}), and what lies there is started "
            "as you. Use a folder of your own."
        )


def _owner_of_new_files(folder: Path) -> int | None:
    """The owner of files that this process makes there: some network disks give root's to nobody. None where it may
    make none.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as own:
            return os.fstat(own.fileno()).st_uid
    except OSError:
        return None


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
        if owner != os.getuid() and owner != _owner_of_new_files(path.parent):
            raise LaunchError(
                f"{path} belongs to user {owner}, not to this run's user: nothing in it was read. Use a run "
                "directory in which no other user may write"
            )
        return file.read()
