"""Brings the newest checkpoint from a store to a run's directory, where it is newer than all that are there.

It appears as a save does: in a `.partial` directory, compared with the checksums of its marker, then by its name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find, partial_path, publish, sync_directory, verify
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoint, RemoteCheckpoints, folder_of
from paceline.errors import CheckpointError
from paceline.units import bytes_text

__all__ = ["download", "fetch_newest"]

PIECE_BYTES = 16 << 20  # of one request: a connection that is cut costs so much
THREADS = 8


def fetch_newest(
    directory: Path, remote: RemoteCheckpoints, *, found: Sequence[RemoteCheckpoint], say: Callable[[str], None]
) -> int | None:
    """Download the newest good checkpoint, if it is newer than those in `directory`; returns its step, or None.

    A damaged one is passed over, as on a disk. Raises CheckpointError where nothing is to be continued from what is
    there: it was written by a newer Paceline, or the disk has no room.
    """
    at = find(directory, verified=True).step
    for one in reversed(found):
        where = remote.store.where(folder_of(one.step))
        if one.step <= at:
            return None
        if one.is_newer_format:
            raise CheckpointError(
                f"{where} is newer than what this Paceline reads ({one.problem}). Use that version, move it away, or "
                "start over with --fresh, which leaves it where it is"
            )
        if one.problem is not None:
            if COMMIT_MARKER in one.files:
                say(f"{where} was passed over: {one.problem}")
            continue
        say(f"downloading {where} ({bytes_text(one.num_bytes)})")
        try:
            download(directory, remote, one)
        except _Damaged as error:
            say(f"{where} was passed over: {error}")
            continue
        return one.step
    return None


def download(directory: Path, remote: RemoteCheckpoints, one: RemoteCheckpoint) -> Path:
    """Bring a complete checkpoint to a directory; returns its path. Raises CheckpointError, StorageError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < one.num_bytes:
        raise CheckpointError(
            f"{remote.store.where(folder_of(one.step))} has {bytes_text(one.num_bytes)}, and {bytes_text(free)} are "
            f"free in {directory}: free space there, or use another --run-dir"
        )
    partial = partial_path(directory, one.step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _fill(partial, remote, one)
        (partial / COMMIT_MARKER).write_bytes(one.marker)
        try:
            verify(partial)
        except CheckpointError as error:
            raise _Damaged(str(error)) from error
        sync_directory(partial)
        return publish(partial)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
        raise


class _Damaged(CheckpointError):
    """What came is not what was written."""


def _fill(partial: Path, remote: RemoteCheckpoints, one: RemoteCheckpoint) -> None:
    files = {} if one.mark is None else one.mark.files
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="download"))
        opened = {name: stack.enter_context(open(partial / name, "wb")) for name in files}

        def bring(name: str, start: int, end: int) -> None:
            data = remote.store.read(f"{folder_of(one.step)}/{name}", start, end)
            os.pwrite(opened[name].fileno(), data, start)

        tasks = [
            pool.submit(bring, name, start, end)
            for name, num_bytes in files.items()
            for start, end in _pieces(num_bytes)
        ]
        try:
            for task in concurrent.futures.as_completed(tasks):
                task.result()
        except FileNotFoundError as error:
            raise _Damaged(f"a file is gone ({error})") from error
        finally:
            pool.shutdown(cancel_futures=True)
        for file in opened.values():
            os.fsync(file.fileno())


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_bytes, PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, num_bytes)
