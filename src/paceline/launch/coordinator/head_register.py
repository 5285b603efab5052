"""Who leads a run: a register in the run's directory that one coordinator at a time can change, like a lock service.

`RUN/head.json` names the coordinator's address, its epoch, and what another coordinator needs to take over. A
coordinator writes it before it announces a generation, or starts workers again, and only while the epoch is its own.
One that takes over raises the epoch. So a coordinator that was cut off, or stood still, cannot decide anything any
more: its next write fails, whatever it believes. No clock is involved.

A change is made under a lock on `RUN/.head.lock`, which the kernel frees with its holder, and replaces the file in one
step. On a shared disk both work between hosts (NFS from version 4, Lustre, GPFS). Hosts that do not share the
directory find no register in theirs, or one of another run, and nobody takes over there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DISK_FULL
from paceline.plain_data import read_object, text_of, whole
from paceline.private_files import make_run_directory, replace_private
from paceline.regular_files import read_regular

__all__ = ["HeadRecord", "HeadRegister", "LocksMissing", "Superseded"]

NAME, LOCK = "head.json", ".head.lock"
MOST_BYTES = 1 << 26
LOCK_S = 1.0  # a write takes milliseconds; a holder that stands still is not waited for longer
RETRY_S = 0.02
SPARE_BYTES = 1 << 14  # the file has some room, so that a full disk takes a longer record, too
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid (0: the open file owns the lock)


class LocksMissing(OSError):
    """The file system has no locks: nobody can take over there."""


class Superseded(Exception):
    """Another coordinator leads the run."""

    def __init__(self, record: HeadRecord | None) -> None:
        self.record = record
        by = "nobody" if record is None else f"host {record.host} ({record.address})"
        super().__init__(f"the run is led by {by} now")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadRecord:
    """What the register says."""

    run: str  # a random name of this start of the run, which its hosts know
    attempt: int
    epoch: int  # 0 for the first coordinator; each one that takes over has a higher one
    host: str  # the coordinator's host, for people
    address: str  # HOST:PORT where it listens
    state: Mapping[str, Any]  # what another coordinator takes over, as plain data

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeadRecord:
        """Read what `to_json` returned; raise LookupError, TypeError or ValueError if it is something else."""
        state = data["state"]
        if not isinstance(state, dict):
            raise TypeError("the state is no object")
        return cls(
            run=text_of(data["run"]),
            attempt=whole(data["attempt"]),
            epoch=whole(data["epoch"]),
            host=text_of(data["host"]),
            address=text_of(data["address"]),
            state=state,
        )


class HeadRegister:
    """The register of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._lock = Path(run_dir) / NAME, Path(run_dir) / LOCK

    def read(self) -> HeadRecord | None:
        """Return what it says; None where there is none, or it cannot be read now."""
        with contextlib.suppress(OSError):
            return self._read()
        return None

    def _read(self) -> HeadRecord | None:
        """Return what it says; None where there is none, or it is damaged. Raises OSError where the disk does not give
        it now: it may be another coordinator's."""
        with contextlib.suppress(FileNotFoundError, LookupError, TypeError, ValueError):
            return HeadRecord.from_json(read_object(read_regular(self._path, MOST_BYTES)))
        return None

    def begin(self, record: HeadRecord) -> None:
        """Enter the first coordinator of a start of the run; the caller holds the run directory. Raises OSError."""
        make_run_directory(self._path.parent)
        with self._locked():
            self._write(record)

    def update(self, record: HeadRecord) -> None:
        """Write what the present coordinator has to tell. Raises Superseded where it is not the coordinator any more,
        and OSError where the disk cannot be reached. From a register that was removed nobody can take over: it is made
        anew.
        """
        make_run_directory(self._path.parent)
        with self._locked():
            now = self._read()
            if now is not None and _is_led_otherwise(now, record, record.epoch):
                raise Superseded(now)
            self._write(record)

    def take_over(self, record: HeadRecord) -> None:
        """Become the coordinator, after the one of the epoch before. Raises Superseded where another was faster."""
        with self._locked():
            now = self._read()
            if now is None or _is_led_otherwise(now, record, record.epoch - 1):
                raise Superseded(now)
            self._write(record)

    def end(self, record: HeadRecord) -> None:
        """Remove it: the run has ended. Another coordinator's stays."""
        with contextlib.suppress(OSError), self._locked():
            now = self._read()
            if now is not None and (now.run, now.epoch) == (record.run, record.epoch):
                self._path.unlink()

    def _write(self, record: HeadRecord) -> None:
        """Replace the file; on a full disk it is overwritten, which a reader may see half done, and reads again."""
        text = json.dumps(record.to_json()).encode()
        text = text.ljust(SPARE_BYTES * (len(text) // SPARE_BYTES + 2))
        try:
            replace_private(self._path, text)
        except OSError as error:
            if error.errno not in DISK_FULL or self._path.stat().st_size < len(text.rstrip()):
                raise
            with open(self._path, "r+b") as file:
                file.write(text[: self._path.stat().st_size])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if sys.platform != "linux":
            raise LocksMissing(errno.ENOSYS, "this system has no locks of open files")
        file = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_S
            whole_file = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            while True:
                try:
                    fcntl.fcntl(file, fcntl.F_OFD_SETLK, whole_file)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise LocksMissing(error.errno, f"{self._lock} cannot be locked: {error.strerror}") from error
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{self._lock} has been held for {LOCK_S:.0f} s") from None
                    time.sleep(RETRY_S)
            yield
        finally:
            os.close(file)


def _is_led_otherwise(now: HeadRecord, record: HeadRecord, epoch: int) -> bool:
    """Whether the register is not as the coordinator of this epoch has left it."""
    return (now.run, now.epoch) != (record.run, epoch) or now.attempt > record.attempt
