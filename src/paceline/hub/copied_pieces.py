"""The pieces of a folder in object storage that have come to this host's disk, and how further ones come.

Files have their full size from the beginning, and holes in the place of what has not come. A ledger beside them has a
line for each piece that is on the disk and is of the version that was looked at first. So nothing is asked for twice:
neither by another worker, nor by a run after a kill. Only one process at a time brings pieces (`host_lock`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.hub.stored_folder import FolderChanged, StoredFolder, tag_of
from paceline.storage.object_store import ObjectStore
from paceline.units import bytes_text

__all__ = ["PIECE_BYTES", "CopiedPieces", "all_pieces", "pieces_of"]

PIECE_BYTES = 1 << 20  # a multiple of every page size; ledgers of larger pieces are read as a part of what came
REQUEST_BYTES, THREADS = 8 << 20, 8  # neighbouring pieces come in one request
SETTLED_BYTES = 64 << 20  # that may be lost by a kill, beside the requests under way
LEDGER = ".pieces"
BOOT_ID = "/proc/sys/kernel/random/boot_id"

Piece = tuple[str, int]  # an object's name, and where the piece begins


def pieces_of(name: str, start: int, end: int) -> Iterator[Piece]:
    """Yield the pieces that have the bytes from `start` to `end`."""
    for begin in range(start - start % PIECE_BYTES, end, PIECE_BYTES):
        yield name, begin


def all_pieces(folder: StoredFolder) -> list[Piece]:
    """Return the pieces of all objects."""
    return [piece for name, one in folder.objects.items() for piece in pieces_of(name, 0, one.num_bytes)]


class CopiedPieces:
    """The pieces in one folder on the disk. `bring` is called under the folder's lock."""

    def __init__(self, stored: StoredFolder, folder: Path) -> None:
        self.stored, self.folder = stored, folder
        self._ledger = _Ledger(folder / LEDGER)

    def bring(self, store: ObjectStore, wanted: Iterable[Piece]) -> None:
        """Have these pieces on the disk. Raises CheckpointError where the disk has no room, FolderChanged where an
        object is another one meanwhile, and StorageError; what came before is not asked for again."""
        pieces, known, boot = set(wanted), self._known(), _boot_id()
        missing = sorted(pieces - known.keys())
        self._look_again(piece for piece in pieces & known.keys() if known[piece] != boot)
        if not missing:
            return
        self._require_room(missing)
        with contextlib.ExitStack() as stack:
            opened = {name: self._open(name, stack) for name in {name for name, _ in missing}}
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="weights"))

            def fetch(request: _Request) -> _Request:
                data = store.read(request.name, request.start, request.end)
                if len(data) != request.end - request.start:
                    raise FolderChanged.at(self.stored.address)
                os.pwrite(opened[request.name], data, request.start)
                return request

            tasks = [pool.submit(fetch, one) for one in self._requests(missing)]
            came: list[_Request] = []
            try:
                for task in concurrent.futures.as_completed(tasks):
                    came.append(task.result())
                    if sum(one.end - one.start for one in came) >= SETTLED_BYTES:
                        self._settle(store, came, opened)
                        came = []
            except FileNotFoundError as error:
                raise FolderChanged.at(self.stored.address) from error
            finally:
                pool.shutdown(cancel_futures=True)
                self._settle(store, came, opened)

    def _known(self) -> dict[Piece, str]:
        """What the ledger has, without what it says of files that were removed since: new ones would be holes alone."""
        known = self._ledger.read()
        lost = {name for name in {name for name, _ in known} if not self._is_there(name)}
        if lost:
            known = {piece: boot for piece, boot in known.items() if piece[0] not in lost}
            self._ledger.write(known)
        return known

    def _is_there(self, name: str) -> bool:
        try:
            return (self.folder / name).stat().st_size == self.stored.objects[name].num_bytes
        except (FileNotFoundError, KeyError):
            return False

    def forget_ledger(self) -> None:
        """The folder is whole: it needs no ledger."""
        self._ledger.path.unlink(missing_ok=True)

    def _settle(self, store: ObjectStore, came: Iterable[_Request], opened: Mapping[str, int]) -> None:
        """Note what came: when it is on the disk, since a note may outlive the page cache, and of the right version."""
        came = list(came)
        for name in {one.name for one in came}:
            os.fsync(opened[name])
            try:
                is_same = tag_of(store, name) == self.stored.tags[name]
            except FileNotFoundError:
                is_same = False
            if not is_same:
                raise FolderChanged.at(self.stored.address)
        self._ledger.add(piece for one in came for piece in pieces_of(one.name, one.start, one.end))

    def _requests(self, missing: Iterable[Piece]) -> list[_Request]:
        found: list[_Request] = []
        for name, start in missing:
            end = min(start + PIECE_BYTES, self.stored.objects[name].num_bytes)
            last = found[-1] if found else None
            if last is not None and (last.name, last.end) == (name, start) and end - last.start <= REQUEST_BYTES:
                last.end = end
            else:
                found.append(_Request(name, start, end))
        return found

    def _open(self, name: str, stack: contextlib.ExitStack) -> int:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, file)
        os.truncate(file, self.stored.objects[name].num_bytes)
        return file

    def _look_again(self, pieces: Iterable[Piece]) -> None:
        """Drop what the page cache has of these pieces: on a disk that hosts share, another one may have written them
        after this one has looked at their neighbours."""
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.ExitStack() as stack:
            opened: dict[str, int] = {}
            for name, start in pieces:
                if name not in opened:
                    opened[name] = self._open(name, stack)
                os.posix_fadvise(opened[name], start, PIECE_BYTES, os.POSIX_FADV_DONTNEED)

    def _require_room(self, missing: Iterable[Piece]) -> None:
        sizes = self.stored.objects
        needed = sum(min(PIECE_BYTES, sizes[name].num_bytes - start) for name, start in missing)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.stored.address} has {bytes_text(needed)} more to come, and {bytes_text(free)} are free in "
                f"{self.folder.parent}, where each host keeps one copy: free space there, or name another place, "
                "from_pretrained(..., cache_dir=...)"
            )


class _Request:
    """Bytes of an object that come at once."""

    def __init__(self, name: str, start: int, end: int) -> None:
        self.name, self.start, self.end = name, start, end


class _Ledger:
    """Which pieces are on the disk, one line each, with the kernel by which they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[Piece, str]:
        found: dict[Piece, str] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # a line that a kill has cut
                    name, start, *boot = json.loads(line)
                    found[name, start] = boot[0] if boot else ""
        return found

    def add(self, pieces: Iterable[Piece]) -> None:
        boot = _boot_id()
        lines = [_line(piece, boot) for piece in pieces]
        if lines:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(lines))

    def write(self, known: Mapping[Piece, str]) -> None:
        """Have these pieces alone."""
        new = self.path.with_suffix(".new")
        new.write_text("".join(_line(piece, boot) for piece, boot in known.items()), encoding="utf-8")
        new.rename(self.path)


def _line(piece: Piece, boot: str) -> str:
    return f"\n{json.dumps([*piece, boot])}"


def _boot_id() -> str:
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
