"""The checkpoints of a run on disk: which are complete, which is the newest, and how one appears.

    checkpoints/
      step_00000100/               complete: checkpoint.json is there and every file has the size that it lists
        __0_0.distcp  .metadata    the tensors, in torch's distributed-checkpoint format
        state.pt                   everything else
        checkpoint.json            the commit marker: written last
      step_00000200.partial-4711/  being written by process 4711
      step_00000050.removed-4711/  being deleted

A save fills a `.partial` directory, flushes it to the disk, and commits by writing the marker; only then the directory
gets its final name. Deleting (`retention.py`) begins with the rename to `.removed`. Each of these is one atomic step. A
kill between any two leaves either a complete checkpoint or a name that says what it was.

Sizes reveal torn files, but not changed bits. So the marker has a checksum of each file, and one of itself. Searching
compares sizes, which is cheap; `verified=True` also reads the files. No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.errors import CheckpointError
from paceline.plain_data import read_object
from paceline.regular_files import open_regular, read_regular

__all__ = [
    "COMMIT_MARKER",
    "CommitMarker",
    "FoundCheckpoint",
    "NewerFormatError",
    "candidates",
    "checksum",
    "find",
    "is_newer_format",
    "is_whole",
    "parse_commit_marker",
    "partial_path",
    "publish",
    "read_commit_marker",
    "remove",
    "step_of",
    "sync_directory",
    "usable",
    "verify",
    "whole_file",
    "write_commit_marker",
]

COMMIT_MARKER = "checkpoint.json"
FORMAT = 1
CHUNK_BYTES = 1 << 20  # read of a file at once
_FIELDS = frozenset({"format", "step", "about", "files", "file_crc32", "tensor_crc32"})
_NAME = re.compile(r"step_(\d{8,})(?:\.(partial|removed)-(\d+))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitMarker:
    """The contents of `checkpoint.json`."""

    step: int
    about: Mapping[str, Any]
    files: Mapping[str, int]  # bytes of each
    file_crc32: Mapping[str, int]  # of each; in early versions only of small files
    tensor_crc32: Mapping[str, int]  # over the elements; for tied tensors, under the name that is stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """The newest complete checkpoint (None and step 0: there is none), and which could not be used and why."""

    newest: Path | None
    step: int
    skipped: tuple[tuple[Path, str], ...]
    newer: tuple[Path, ...] = ()  # those beyond `step` that a newer Paceline has written


class NewerFormatError(CheckpointError):
    """A newer Paceline has written this checkpoint: it is no damaged one, and must stay."""


def find(directory: Path, *, verified: bool = False) -> FoundCheckpoint:
    """Find the newest complete checkpoint in a directory; reads markers and file sizes.

    With `verified` its files are read, too, and compared with their checksums. A damaged checkpoint is skipped, and the
    next older one is tried.
    """
    complete: list[tuple[int, Path]] = []
    skipped: dict[Path, str] = {}
    newer: list[Path] = []
    named = list(candidates(directory))
    for path in named:
        try:
            complete.append((usable(path).step, path))
        except CheckpointError as error:
            skipped[path] = str(error)
            if isinstance(error, NewerFormatError):
                newer.append(path)
    complete.sort(key=lambda found: found[0])  # at the same step the later candidate is the newer
    while verified and complete:
        path = complete[-1][1]
        try:
            verify(path)
            break
        except CheckpointError as error:
            skipped[path] = str(error)
            complete.pop()
    step, newest = complete[-1] if complete else (0, None)
    in_order = tuple((path, skipped[path]) for path in named if path in skipped)
    beyond = tuple(path for path in newer if step_of(path) > step)
    return FoundCheckpoint(newest=newest, step=step, skipped=in_order, newer=beyond)


def verify(path: Path) -> CommitMarker:
    """Read a checkpoint's marker and all of its files; raises CheckpointError naming the first damaged file."""
    mark = read_commit_marker(path)
    for name in mark.files:
        try:
            is_damaged = name in mark.file_crc32 and checksum(path / name) != mark.file_crc32[name]
        except OSError as error:
            raise CheckpointError(f"the file {name} cannot be read: {error.strerror or error}") from error
        if is_damaged:
            raise CheckpointError(f"the file {name} is damaged: its checksum does not match")
    return mark


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
    with cast("io.FileIO", open_regular(path, buffering=0)) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def read_commit_marker(path: Path) -> CommitMarker:
    """Read a checkpoint's marker and compare file sizes with it; raises CheckpointError that says what is wrong."""
    try:
        text = read_regular(path / COMMIT_MARKER)
    except FileNotFoundError:
        if not path.is_dir():
            raise CheckpointError("there is no such directory") from None
        raise CheckpointError(f"it has no {COMMIT_MARKER}: the save was not completed") from None
    except OSError as error:
        raise CheckpointError(f"{COMMIT_MARKER} cannot be read: {error}") from error
    mark = parse_commit_marker(text)
    for name, num_bytes in mark.files.items():
        try:
            present = (path / name).stat()
        except OSError as error:
            raise CheckpointError(f"the file {name} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(present.st_mode):
            raise CheckpointError(f"{name} is no regular file")
        if present.st_size != num_bytes:
            raise CheckpointError(f"the file {name} has {present.st_size} bytes; {num_bytes} were written")
    return mark


def parse_commit_marker(text: bytes) -> CommitMarker:
    """Read what is in a marker; raises CheckpointError where it is damaged, or names files elsewhere."""
    try:
        mark = _marker_from(read_object(text, is_strict=True))
    except NewerFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{COMMIT_MARKER} cannot be read: {error}") from error
    for name in mark.files:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{COMMIT_MARKER} names the file {name!r}, which is outside the checkpoint")
    return mark


def write_commit_marker(path: Path, mark: CommitMarker) -> None:
    """Commit the checkpoint in `path`: when this returns, the marker and its files survive a power failure."""
    sync_directory(path)  # the files' names before the marker's
    temporary = path / f"{COMMIT_MARKER}.new"
    fields = {"format": FORMAT, **dataclasses.asdict(mark)}
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({**fields, "crc32": _fields_crc32(fields)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / COMMIT_MARKER)
    sync_directory(path)


def partial_path(directory: Path, step: int) -> Path:
    """Return where this process writes a checkpoint before it is committed."""
    return directory / f"step_{step:08d}.partial-{os.getpid()}"


def publish(path: Path) -> Path:
    """Give a committed `.partial` directory its final name, in place of an older one; returns the new path."""
    final = path.with_suffix("")
    if os.path.lexists(final):  # this step was saved before; both are complete, so a kill from here on loses nothing
        remove(final)
    path.rename(final)
    sync_directory(path.parent)
    return final


def remove(path: Path) -> None:
    """Delete a checkpoint in such a way that it never looks like a damaged one; of a link only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if ".removed-" not in path.name:
        path = path.rename(path.with_name(f"{path.name.partition('.')[0]}.removed-{os.getpid()}"))
    shutil.rmtree(path)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that is complete and on the disk when this ends, or absent; raises CheckpointError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):  # where its folder cannot be made, neither can it be removed
            temporary.unlink()


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def candidates(directory: Path) -> Iterator[Path]:
    """Yield everything named like a checkpoint, by step; at the same step a `.partial` last, because it is newer."""
    if directory.is_dir():
        yield from sorted(
            (p for p in directory.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: (step_of(p), p.name)
        )


def step_of(path: Path) -> int:
    matched = _NAME.fullmatch(path.name)
    return int(matched[1]) if matched else -1


def usable(path: Path) -> CommitMarker:
    """Return the marker of a complete checkpoint; a `.partial` is complete, too, once its marker is there."""
    if ".removed-" in path.name:
        raise CheckpointError("it was being deleted when its process ended")
    return read_commit_marker(path)


def is_newer_format(path: Path) -> bool:
    """Return whether a newer Paceline has written a checkpoint."""
    try:
        usable(path)
    except NewerFormatError:
        return True
    except CheckpointError:
        pass
    return False


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint is complete, by its marker and the sizes of its files."""
    with contextlib.suppress(CheckpointError):
        usable(path)
        return True
    return False


def _marker_from(fields: Mapping[str, Any]) -> CommitMarker:
    version = fields["format"]
    if isinstance(version, int) and version > FORMAT:
        raise NewerFormatError(
            f"it is of format {version}, and this Paceline reads format {FORMAT}: use the version that has written it"
        )
    if version != FORMAT:
        raise ValueError(f"it is of format {version!r}; this Paceline reads format {FORMAT}")
    own = {name: value for name, value in fields.items() if name != "crc32"}
    if own.keys() != _FIELDS or (
        "crc32" in fields and fields["crc32"] != _fields_crc32(own)
    ):  # early versions have none
        raise ValueError("it is damaged: its checksum does not match")
    return CommitMarker(
        step=int(fields["step"]),
        about=dict(fields["about"]),
        files={str(name): int(size) for name, size in fields["files"].items()},
        file_crc32={str(name): int(crc) for name, crc in fields["file_crc32"].items()},
        tensor_crc32={str(name): int(crc) for name, crc in fields["tensor_crc32"].items()},
    )


def _fields_crc32(fields: Mapping[str, Any]) -> int:
    """Return a checksum of a marker's values, independent of its formatting."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
