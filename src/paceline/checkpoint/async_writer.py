"""Saves checkpoints asynchronously: training waits for a copy in memory only, a thread does the rest.

One save is one `_PendingSave`. The thread handles them in order: it writes the tensors in torch's format and the other
state beside them, flushes both to the disk, commits with the marker, gives the directory its name, and deletes what is
beyond `keep`. A save that fails leaves older checkpoints as they are, is reported by an event, and is raised by `wait`
and `close`; training continues.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import clock
from paceline.checkpoint.checkpoint_dir import (
    COMMIT_MARKER,
    CommitMarker,
    checksum,
    partial_path,
    publish,
    verify,
    write_commit_marker,
)
from paceline.checkpoint.dcp_shards import TensorRegion
from paceline.checkpoint.reader import STATE
from paceline.checkpoint.retention import Leftovers, prune, tidy
from paceline.checkpoint.sharded_writer import WriterGroup, is_over, lower_priority
from paceline.checkpoint.staging import NoRoom, Staged, Staging, bytes_of
from paceline.checkpoint.state_tree import encode_state, freeze
from paceline.errors import CheckpointError
from paceline.events import CheckpointFailed, CheckpointSaved, Event, Warned
from paceline.plain_data import read_object
from paceline.units import bytes_text

__all__ = ["AsyncWriter"]


_Fingerprint = tuple[tuple[str, int, int], ...]  # name, bytes and modification time of each file


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingSave:
    """Everything the thread needs for one checkpoint."""

    step: int
    staged: Staged
    state: Any  # frozen
    about: dict[str, Any]
    stall_s: float
    number: int  # of this writer's saves, from 1
    where: Mapping[str, TensorRegion]  # of tensors of which this writer holds a part


class AsyncWriter:
    """Writes the checkpoints of one run, one after the other; used by one thread of one process."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        on_event: Callable[[Event], None],
        parts: WriterGroup | None = None,
        tidies: bool = True,
        staging: Path | None = None,
        newer_start: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Nothing is touched before the first save.

        directory: of all checkpoints of the run. keep: how many complete ones stay. on_event: is called from the
        writing thread. parts: the writers of a sharded replica, of which this one is the first. tidies: whether to
        delete what earlier writers left unfinished before the first save; not where one of them may still be writing.
        staging: a directory on a disk for the staged copies; None: they are in memory. newer_start: says which later
        start of the run has taken over the directory; then nothing is committed any more.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1: the newest checkpoint always stays.")
        self._directory, self._keep, self._on_event = directory, keep, on_event
        self._parts, self._number, self._newer_start = parts, 0, newer_start
        self._staging = Staging(staging)
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=lower_priority
        )
        self._pending: concurrent.futures.Future[None] | None = None
        self._is_tidy, self._leftovers = not tidies, Leftovers()
        self._newest: Path | None = None
        self._failure: str | None = None  # of the last save
        self._known_good: dict[Path, _Fingerprint] = {}  # checkpoints as they were when they were written, or verified
        self._known_damaged: set[Path] = set()  # and already reported

    def warm(self, tensors: Mapping[str, Tensor]) -> None:
        """Get memory for these tensors in the background, so that the first save stalls no longer than later ones.

        Call it once everything that will be saved exists: after the first step, which creates the optimizer's state.
        """
        self._settle(None)
        self._pending = self._thread.submit(self._staging.warm, dict(tensors))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        *,
        where: Mapping[str, TensorRegion] | None = None,
    ) -> float:
        """Copy everything and return; it is written in the background. Returns the seconds that this call took.

        tensors: dense, of any device; tied ones are stored once. state: plain values (see state_tree). about: JSON
        values. where: the regions of tensors that several writers hold together. Blocks until the previous save is
        written. Raises CheckpointError for a value that cannot be stored, before anything is written. A lack of memory
        for the copy fails only this save.
        """
        began = time.perf_counter()
        if step < 0:
            raise ValueError(f"step is {step}; it must be 0 or more.")
        self._number += 1
        try:
            frozen, noted = freeze(dict(state)), _json_copy(about)
            self._settle(None)
            staged = self._staging.stage(tensors)
        except NoRoom as error:
            self._pending = self._thread.submit(self._refuse, step, self._number, str(error))
            return time.perf_counter() - began
        except CheckpointError as error:
            if self._parts is not None:
                self._parts.refuse(self._number, str(error))
            raise
        stall_s = time.perf_counter() - began
        save = _PendingSave(
            step=step,
            staged=staged,
            state=frozen,
            about=noted,
            stall_s=stall_s,
            number=self._number,
            where=dict(where or {}),
        )
        self._pending = self._thread.submit(self._write, save)
        return stall_s

    def is_written(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the thread; returns whether it is idle (`wait` tells the outcome)."""
        return is_over(self._pending, timeout_s)

    def wait(self) -> Path | None:
        """Block until the last save is written; returns the newest checkpoint, None when nothing was saved.

        Raises CheckpointError with the reason when the last save could not be committed.
        """
        self._settle(None)
        if self._failure is not None:
            raise CheckpointError(self._failure)
        return self._newest

    def close(self, timeout_s: float | None = None) -> Path | None:
        """`wait`, then end the thread; raises CheckpointError also when the last save takes longer than `timeout_s`."""
        try:
            self._settle(timeout_s)
        finally:
            self._thread.shutdown(wait=self._pending is None)
        return self.wait()

    def _settle(self, timeout_s: float | None) -> None:
        """Wait for the thread; a bug in it (not a failed save) is raised here."""
        if self._pending is None:
            return
        done, _ = concurrent.futures.wait([self._pending], timeout_s)
        if not done:
            raise CheckpointError(
                f"the last checkpoint was not written within {timeout_s} s; "
                f"those before it in {self._directory} are complete"
            )
        pending, self._pending = self._pending, None
        pending.result()

    def _write(self, save: _PendingSave) -> None:
        """Write and commit one save; runs in the thread."""
        began, has_begun = time.perf_counter(), False
        partial = partial_path(self._directory, save.step)
        try:
            self._fence()
            self._prepare(partial, save.staged.num_bytes)
            if self._parts is not None:
                self._parts.begin(save.number, partial)
                has_begun = True
            num_bytes = _fill(partial, save, self._parts, self._fence)
        except (OSError, RuntimeError, CheckpointError) as error:  # RuntimeError: see _below
            if self._parts is not None and has_begun:
                self._parts.give_up(save.number, str(error))
            elif self._parts is not None:
                self._parts.refuse(save.number, str(error))
            self._fail(save.step, _reason(_below(error), self._directory, save, _removed(partial)))
            return
        write_s = time.perf_counter() - began
        self._newest, self._failure = partial, None  # committed: from here on only the rename can fail
        try:
            self._newest = publish(partial)
            self._known_good[self._newest] = _fingerprint_of(self._newest)
            prune(
                self._directory,
                keep=self._keep,
                newest=self._newest,
                is_good=self._is_good,
                leftovers=self._leftovers,
            )
        except OSError as error:
            self._on_event(Warned(text=f"an older checkpoint in {self._directory} could not be deleted: {error}"))
        self._on_event(
            CheckpointSaved(
                step=save.step, path=str(self._newest), num_bytes=num_bytes, stall_s=save.stall_s, write_s=write_s
            )
        )

    def _fence(self) -> None:
        """Raise CheckpointError where a later start of the run writes in the directory."""
        if (who := self._newer_start()) is not None:
            raise CheckpointError(f"a later start of the run has taken over ({who}): this one saves nothing any more")

    def _refuse(self, step: int, number: int, reason: str) -> None:
        """Report a save for which nothing could be copied; runs in the thread."""
        if self._parts is not None:
            self._parts.refuse(number, reason)
        self._fail(step, f"checkpoint of step {step} was not written: {reason}. Older checkpoints are untouched.")

    def _fail(self, step: int, failure: str) -> None:
        self._failure = failure
        path = partial_path(self._directory, step).with_suffix("")
        self._on_event(CheckpointFailed(step=step, path=str(path), reason=failure))

    def _is_good(self, path: Path) -> bool:
        """Return whether a checkpoint counts among those to keep; verified once, and again after a change."""
        try:
            now = _fingerprint_of(path)
            if self._known_good.get(path) != now:
                verify(path)
                self._known_good[path] = now
        except (CheckpointError, OSError) as error:
            if path not in self._known_damaged:
                self._known_damaged.add(path)
                self._on_event(Warned(text=f"checkpoint {path} does not count among the {self._keep} to keep: {error}"))
            return False
        return True

    def _prepare(self, partial: Path, num_bytes: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._is_tidy:
            self._is_tidy = True  # later on, another process may be writing
            try:
                tidy(self._directory)
            except OSError as error:
                text = f"what earlier saves left unfinished in {self._directory} could not be deleted: {error}"
                self._on_event(Warned(text=text))
        if shutil.disk_usage(self._directory).free < num_bytes:  # do not fill the disk in vain
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        partial.mkdir()


def _fill(partial: Path, save: _PendingSave, parts: WriterGroup | None, fence: Callable[[], None]) -> int:
    """Write all files, the marker last; returns their bytes."""
    tensor_crc32 = _write_tensors(partial, save, parts)
    state = encode_state(save.state)
    with open(partial / STATE, "wb") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())
    written = sorted(partial.iterdir())
    files = {path.name: path.stat().st_size for path in written}
    mark = CommitMarker(
        step=save.step,
        about=save.about,
        files=files,
        file_crc32={path.name: checksum(path) for path in written},  # read back from the system's page cache, mostly
        tensor_crc32=tensor_crc32,
    )
    fence()
    write_commit_marker(partial, mark)
    return sum(files.values()) + (partial / COMMIT_MARKER).stat().st_size


def _fingerprint_of(path: Path) -> _Fingerprint:
    """Return a value that changes when a checkpoint's files are written to."""
    found = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return tuple((name, about.st_size, about.st_mtime_ns) for name, about in found)


def _write_tensors(partial: Path, save: _PendingSave, parts: WriterGroup | None) -> dict[str, int]:
    """Write the tensors and their index, together with the other writers if there are any; returns the checksums."""
    # Imported here because it imports torch.distributed.checkpoint, which must not happen on the training thread.
    from paceline.checkpoint.dcp_shards import crc32_of_tensors, write_index, write_shard
    from paceline.checkpoint.dcp_write import write_tensors

    staged = save.staged
    if parts is None:
        write_tensors(partial, staged.tensors, staged.ties)
        return {name: zlib.crc32(bytes_of(tensor)) for name, tensor in staged.tensors.items()}
    pieces = write_shard(partial, 0, staged.tensors, save.where)
    others, ties = parts.collect(save.number, partial)
    pieces += others
    write_index(partial, pieces, {**staged.ties, **ties})
    return crc32_of_tensors(pieces)


def _removed(partial: Path) -> str:
    """Delete a failed save's directory; returns a sentence for the error if that fails, too."""
    try:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(partial)
    except OSError as error:
        return f" What was written remains in {partial} ({error.strerror})."
    return ""


def _reason(error: BaseException, directory: Path, save: _PendingSave, remains: str) -> str:
    """Return what happened and what to do, in one line."""
    text = f"checkpoint of step {save.step} was not written: {str(error).partition(chr(10))[0]}"
    with contextlib.suppress(OSError):
        free, needed = shutil.disk_usage(directory).free, save.staged.num_bytes
        text += f" ({bytes_text(free)} free in {directory}, {bytes_text(needed)} needed)"
    remedy = "Free space there, keep fewer (keep=), or use another run_dir."
    if isinstance(error, CheckpointError):  # of another writer, complete with its remedy
        remedy = ""
    elif isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"Look at {directory} and the disk below it, or use another run_dir."
    return f"{text}. Older checkpoints are untouched. {remedy}{remains}"


def _below(error: BaseException) -> BaseException:
    """Return the OSError behind an error: torch's zip writer turns it into a RuntimeError about file positions."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def _json_copy(about: Mapping[str, Any]) -> dict[str, Any]:
    noted = {"torch": torch.__version__, "saved_at": clock.now(), **about}
    try:
        written = json.dumps({"about": noted}, allow_nan=False)
        return read_object(written, is_strict=True)["about"]  # as it will be read
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot store about: {error}; it holds JSON values only.") from error
