"""A checkpoint on its way to a store: its files stay on the disk until all are sent, whatever retention deletes.

    RUN/uploads/step_00000100/
      __0_0.distcp  .metadata  state.pt  checkpoint.json     hard links: no space while the checkpoint is there
      .notes/__0_0.distcp                                    how far this file is, for a process that goes on with it

Hosts that share the disk divide the files among them: each takes the lock of a file's note before it sends the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, CommitMarker, parse_commit_marker, verify
from paceline.errors import CheckpointError
from paceline.plain_data import read_object
from paceline.regular_files import read_regular

__all__ = ["UPLOADS", "FileNote", "StagedUpload", "locked", "staged_steps"]

UPLOADS = "uploads"
NOTES = ".notes"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS)  # of disks that have none: a copy


def staged_steps(run_dir: Path) -> list[int]:
    """Return the steps whose upload has begun, and is not over."""
    with contextlib.suppress(OSError):
        return sorted(
            int(path.name[5:])
            for path in (run_dir / UPLOADS).iterdir()
            if path.name.startswith("step_") and path.name[5:].isdecimal()
        )
    return []


class FileNote:
    """What is remembered of one file's upload; written in place, because its lock is on the file itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> Mapping[str, Any]:
        """Return what was written last; nothing where that was cut off."""
        try:
            return read_object(os.pread(self._descriptor, 1 << 16, 0))
        except (OSError, ValueError):
            return {}

    def write(self, fields: Mapping[str, Any]) -> None:
        """Remember this in place of what was."""
        data = json.dumps(dict(fields)).encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        os.fsync(self._descriptor)


class StagedUpload:
    """One checkpoint that is being uploaded."""

    def __init__(self, run_dir: Path, step: int) -> None:
        """Nothing is touched."""
        self.step = step
        self.directory = run_dir / UPLOADS / f"step_{step:08d}"
        self.marker = b""
        self._mark: CommitMarker | None = None

    @property
    def mark(self) -> CommitMarker:
        """The commit marker's contents; known after `stage`."""
        if self._mark is None:
            raise RuntimeError("the upload is not staged")
        return self._mark

    def stage(self, checkpoint: Path | None) -> None:
        """Hold the files of a complete checkpoint (None: those that are held already are all there is), and check them.

        What is held of another checkpoint of the same step is given up first. Raises CheckpointError where the files
        are not as they were written, OSError where they cannot be held.
        """
        if checkpoint is not None:
            with locked(self.directory.parent / ".lock"):  # another host may be at the same
                marker = read_regular(checkpoint / COMMIT_MARKER)
                if self._held_marker() != marker:
                    self.drop()
                    self._hold(checkpoint, parse_commit_marker(marker))
        self.marker = read_regular(self.directory / COMMIT_MARKER)
        self._mark = parse_commit_marker(self.marker)
        if not (self.directory / NOTES / ".checked").exists():  # a damaged copy must not replace a good one
            verify(self.directory)
            (self.directory / NOTES / ".checked").touch()

    def drop(self) -> None:
        """Give the files up."""
        for left in self.directory.parent.glob("*.removed-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            gone = self.directory.with_name(f"{self.directory.name}.removed-{os.getpid()}")
            self.directory.rename(gone)
            shutil.rmtree(gone)

    def forget(self) -> None:
        """Forget which files are there: they are sent again."""
        for note in (self.directory / NOTES).glob("*"):
            note.write_bytes(b"")

    @contextlib.contextmanager
    def taking(self, name: str) -> Iterator[FileNote | None]:
        """Take a file; None: another host's process sends it. Where the disk has no locks, both send it."""
        notes = self.directory / NOTES
        descriptor = os.open(notes / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            except OSError:  # no locks here
                pass
            yield FileNote(descriptor)
        finally:
            os.close(descriptor)

    def _held_marker(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return read_regular(self.directory / COMMIT_MARKER)
        return None

    def _hold(self, checkpoint: Path, mark: CommitMarker) -> None:
        (self.directory / NOTES).mkdir(parents=True, exist_ok=True)
        for name in mark.files:
            _link(checkpoint / name, self.directory / name)
        _link(checkpoint / COMMIT_MARKER, self.directory / COMMIT_MARKER)  # last: what has no marker is not whole


def _link(path: Path, to: Path) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            os.link(path, to)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} was deleted before its upload began") from error
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copyfile(path, to)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out, as far as the disk has locks; the folder is made."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
