"""One checkpoint by several writers: each writes its part into a file of its own, the first one commits.

The writers exchange *mail*: short texts under names. They do not rely on what is on the disk, so a save that fails on
one of them is known to the others at once, even if the disk is full. For save number n (equal on all):

    n/begin     by the first: the directory to write to; or, also later on, that there is none, and why
    n/part_k    by writer k: what it has written and where, and which names are tied; or why it could not

The first then writes an index of all parts (see `dcp_shards`) and commits as one writer would. Writing threads run at
low priority, so that they take only what training leaves.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.dcp_shards import StoredPiece, TensorRegion, pieces_from_json, pieces_to_json, write_shard
from paceline.checkpoint.staging import NoRoom, Staged, Staging
from paceline.errors import CheckpointError
from paceline.plain_data import read_object

__all__ = ["ShardWriter", "WriterChannel", "WriterGroup", "is_over", "lower_priority"]

LOOK_S = 0.02  # between two looks at the mail; only writing threads poll


class WriterChannel(Protocol):
    """How writers reach each other; safe to use from a thread."""

    def put(self, name: str, text: str) -> None:
        """Store a text under a name, in place of this writer's earlier one."""

    def look(self, name: str) -> str | None:
        """Return the text under a name; None: nothing yet. Does not block."""

    def forget(self, name: str) -> None:
        """Drop the text under a name, if there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WriterGroup:
    """One writer's view of all writers."""

    index: int
    count: int
    mail: WriterChannel
    timeout_s: float  # how long one waits for another
    _unread: set[int] = dataclasses.field(
        default_factory=set[int], init=False
    )  # saves with mail that is left: the first's

    def begin(self, number: int, directory: Path) -> None:
        """Announce the directory to the others; called by the first writer, when the directory exists."""
        self._clear(number)
        self.mail.put(f"{number}/begin", json.dumps({"directory": str(directory)}))

    def refuse(self, number: int, reason: str) -> None:
        """Announce that this save will not take place; called by the first writer."""
        self._clear(number)
        self.mail.put(f"{number}/begin", json.dumps({"failed": reason}))

    def give_up(self, number: int, reason: str) -> None:
        """Announce that a begun save has failed; called by the first writer, before the directory is deleted."""
        if number in self._unread:  # otherwise all others have reported, and wait for nothing
            with contextlib.suppress(OSError):  # no room for mail either: they will find no directory
                self.mail.put(f"{number}/begin", json.dumps({"failed": reason}))

    def is_given_up(self, number: int) -> bool:
        """Return whether the first writer has given up, which it reports itself; called by the others."""
        text = self.mail.look(f"{number}/begin")
        return text is not None and "failed" in _read(text)

    def directory(self, number: int) -> Path | None:
        """Wait for the directory; None: the first writer has given up, and reports that. Called by the others."""
        told = self._wait(f"{number}/begin", "worker 0 to begin the checkpoint")
        return Path(told["directory"]) if "directory" in told else None

    def tell(self, number: int, pieces: list[StoredPiece], ties: Mapping[str, str]) -> None:
        """Report that this writer's part is on the disk; `ties` maps names that it has not stored to stored ones."""
        told = {"pieces": pieces_to_json(pieces), "ties": dict(ties)}
        self.mail.put(f"{number}/part_{self.index}", json.dumps(told))

    def tell_failed(self, number: int, reason: str) -> None:
        """Report that this writer's part could not be written."""
        self.mail.put(f"{number}/part_{self.index}", json.dumps({"failed": reason}))

    def stay_heard(self, number: int) -> None:
        """Access the mail, which makes it repeat this writer's report if the store was restarted."""
        # a name that is never used, because the first writer may forget the real ones meanwhile
        self.mail.look(f"{number}/anything")

    def collect(self, number: int, directory: Path) -> tuple[list[StoredPiece], dict[str, str]]:
        """Wait for all other parts and return their pieces and ties; called by the first writer.

        Raises CheckpointError naming the worker whose part is missing, and why.
        """
        found, ties = list[StoredPiece](), dict[str, str]()
        for index in range(1, self.count):
            told = self._wait(f"{number}/part_{index}", f"the part of worker {index}")
            if "failed" in told:
                raise CheckpointError(f"worker {index} could not write its part: {told['failed']}")
            pieces = pieces_from_json(told["pieces"])
            for piece in pieces:
                if not (directory / piece.file).exists():
                    raise CheckpointError(
                        f"worker {index} has written {piece.file}, but it is not in {directory} here: the workers of "
                        "a sharded replica write to one directory. Use a run_dir on a disk that all hosts share"
                    )
            found += pieces
            ties |= told["ties"]
        self._forget(number)  # all have read it
        return found, ties

    def _clear(self, number: int) -> None:
        """Forget the mail of failed saves; the last one before `number` may not have been read yet."""
        for old in sorted(self._unread):
            if old < number - 1:
                self._forget(old)
        self._unread.add(number)

    def _forget(self, number: int) -> None:
        for name in ("begin", *(f"part_{index}" for index in range(1, self.count))):
            self.mail.forget(f"{number}/{name}")
        self._unread.discard(number)

    def _wait(self, name: str, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while (text := self.mail.look(name)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(f"waited {self.timeout_s:g} s in vain for {what}")
            time.sleep(LOOK_S)  # in the writing thread; a blocking wait of the store would lock out its other users
        return _read(text)


def _read(text: str) -> dict[str, Any]:
    try:
        return read_object(text)
    except ValueError as error:
        raise CheckpointError(f"what another worker said of the save {error}") from error


class ShardWriter:
    """Writes this worker's part of checkpoints that the first writer commits; used by one thread of one process."""

    def __init__(self, parts: WriterGroup, *, staging: Path | None = None) -> None:
        """`staging`: a directory on a disk for the staged copies; None: they are in memory."""
        self._parts = parts
        self._number = 0
        self._staging = Staging(staging)
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=lower_priority
        )
        self._pending: concurrent.futures.Future[None] | None = None
        self._failure: str | None = None

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory for these tensors in the background."""
        self._settle(None)
        self._pending = self._thread.submit(self._staging.warm, dict(tensors))

    def save(self, tensors: Mapping[str, Tensor], where: Mapping[str, TensorRegion]) -> None:
        """Copy what this worker holds and return; it is written in the background.

        Raises CheckpointError for a tensor that cannot be stored. A lack of memory for the copies fails only this save.
        """
        self._settle(None)
        self._number += 1
        try:
            staged = self._staging.stage(tensors)
        except NoRoom as error:
            self._pending = self._thread.submit(self._fail, self._number, str(error))
        except CheckpointError as error:
            self._parts.tell_failed(self._number, str(error))
            raise
        else:
            self._pending = self._thread.submit(self._write, self._number, staged, dict(where))

    def is_written(self, timeout_s: float) -> bool:
        """As `AsyncWriter.is_written`. Each call also repeats this part's report if the mail's store was restarted."""
        if not is_over(self._pending, timeout_s):
            return False
        with contextlib.suppress(OSError):  # no room; repeated at the next call
            self._parts.stay_heard(self._number)
        return True

    def wait(self) -> None:
        """Block until the last part is written; raises CheckpointError when it could not be."""
        self._settle(None)
        if self._failure is not None:
            raise CheckpointError(self._failure)

    def close(self, timeout_s: float | None = None) -> None:
        """`wait`, then end the thread."""
        try:
            self._settle(timeout_s)
        finally:
            self._thread.shutdown(wait=self._pending is None)
        self.wait()

    def _settle(self, timeout_s: float | None) -> None:
        if self._pending is None:
            return
        done, _ = concurrent.futures.wait([self._pending], timeout_s)
        if not done:
            raise CheckpointError(f"this worker's part of the last checkpoint was not written within {timeout_s} s")
        pending, self._pending = self._pending, None
        pending.result()

    def _write(self, number: int, staged: Staged, where: Mapping[str, TensorRegion]) -> None:
        """Write one part; runs in the thread."""
        self._failure = None
        parts, told = self._parts, ""
        try:
            directory = parts.directory(number)
            if directory is None:
                return
            if directory.is_dir():
                parts.tell(number, write_shard(directory, parts.index, staged.tensors, where), staged.ties)
                return
            told = (
                f"there is no {directory} on its host: the workers of a sharded replica write to one directory. "
                "Use a run_dir on a disk that all hosts share"
            )
        except (OSError, RuntimeError, CheckpointError) as error:  # torch's zip writer raises RuntimeError
            told = str(error).partition("\n")[0]
        self._fail(number, told)

    def _fail(self, number: int, reason: str) -> None:
        """Report a missing part with its reason, unless the first writer has given up anyway; runs in the thread."""
        self._failure = None
        if not self._parts.is_given_up(number):
            self._failure = f"this worker's part of a checkpoint was not written: {reason}"
            self._parts.tell_failed(number, reason)


def is_over(pending: concurrent.futures.Future[None] | None, timeout_s: float) -> bool:
    """Wait at most `timeout_s` for a writing thread's task; returns whether it is done, or there was none."""
    return pending is None or bool(concurrent.futures.wait([pending], timeout_s).done)


NICENESS = 10  # of the writing thread, added to the process's


def lower_priority() -> None:
    """Lower this thread's priority. Only on Linux has a thread its own; elsewhere it would slow the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):  # a sandbox may forbid even this; saving works at any priority
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
