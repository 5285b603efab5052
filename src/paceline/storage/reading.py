"""Files that are read from object storage, or from a file system: in ranges, each tried a bounded number of times."""

from __future__ import annotations

import fnmatch
import glob
import io
import os
from typing import TYPE_CHECKING, BinaryIO, cast

from paceline.storage.address import check_address, is_address, joined

if TYPE_CHECKING:
    from paceline.storage.object_store import ObjectStore

__all__ = ["files_like", "open_file"]

AHEAD_BYTES = 8 << 20  # of a request
_stores: dict[tuple[int, str], ObjectStore] = {}  # by process and folder: a forked one has none of its parent's


def open_file(path: str | os.PathLike[str], *, block_bytes: int = AHEAD_BYTES) -> BinaryIO:
    """Open a file for reading as bytes: a path, or an address such as `s3://bucket/data/0.jsonl` (also gs://, az://).

    A file in object storage is read in requests of `block_bytes`. One that fails is tried again, six times in all with
    growing pauses, from the byte where it began: nothing is read twice or left out. `seek` and `tell` work, so other
    packages can read tables and archives of it. Credentials come from where the store's own tools look for them.

    Raises FileNotFoundError where there is no such file, PlanError for what is no address, and StorageError, with the
    remedy, where the store does not answer.

    Example::

        with paceline.open_file(paceline.__file__) as file:  # "s3://bucket/data/0.jsonl" is opened alike
            assert file.readline()
    """
    if not is_address(path):
        return open(path, "rb")
    store, name = _store_of(check_address(str(path), option="paceline.open_file()"))
    block = max(1, block_bytes)
    return cast("BinaryIO", io.BufferedReader(_StoredFile(store, name, block), buffer_size=block))


def files_like(pattern: str | os.PathLike[str]) -> list[str]:
    """Return the paths or addresses that a pattern with `*` stands for, sorted; `**` is folders of any depth."""
    text = os.fspath(pattern)
    if not is_address(text):
        return sorted(glob.glob(text, recursive=True))
    folder, names = text, list[str]()
    while "*" in folder:
        folder, _, last = folder.rpartition("/")
        names.insert(0, last)
    if not names:
        return [text]
    from paceline.storage.object_store import ObjectStore

    check_address(folder, option="the pattern of files")
    store = ObjectStore(folder)
    found = [one.name for one in store.listed() if _matches(one.name.split("/"), names)]
    return [joined(store.address, name) for name in sorted(found)]


def _matches(parts: list[str], patterns: list[str]) -> bool:
    if not patterns or not parts:
        return not parts and not any(one != "**" for one in patterns)
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])


def _store_of(address: str) -> tuple[ObjectStore, str]:
    folder, _, name = address.rpartition("/")
    key = os.getpid(), folder
    if key not in _stores:
        from paceline.storage.object_store import ObjectStore  # the packages of stores take a while to load

        _stores[key] = ObjectStore(folder)
    return _stores[key], name


class _StoredFile(io.RawIOBase):
    """Reads an object in ranges of a block at most."""

    def __init__(self, store: ObjectStore, name: str, block_bytes: int) -> None:
        super().__init__()
        self._store, self._name, self._block, self._at = store, name, block_bytes, 0
        size = store.size(name)
        if size is None:
            raise FileNotFoundError(f"there is no {store.where(name)}")
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # io calls it with one
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """The rest: what it has by default asks for 8 KiB at a time."""
        return b"".join(iter(lambda: self._next(self._block), b""))

    def _next(self, num_bytes: int) -> bytes:
        stop = min(self._size, self._at + min(num_bytes, self._block))
        if stop <= self._at:
            return b""
        data = self._store.read(self._name, self._at, stop)
        self._at += len(data)
        return data
