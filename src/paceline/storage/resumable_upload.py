"""Resumable uploads of Google Cloud Storage: one session an object, its bytes in order, from where the store has them.

Each part names the bytes that it has. After a failed try, and in a later process that knows the session, the store is
asked first how many it keeps. The session's address stands in the note of the upload, in a file of mode 0600: with it
that one object can be written, for a week.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["SendNote", "send_resumable"]

UNIT_BYTES = 256 << 10  # of which a part is a multiple, but for the last one
SESSIONS = 3  # that are begun for one file: the store may forget one
GONE = ("404", "410", "499")  # what it answers for a session that it has forgotten


class SendNote(Protocol):
    """What is remembered of one file's upload, until it is done."""

    def read(self) -> Mapping[str, Any]: ...

    def write(self, fields: Mapping[str, Any]) -> None: ...


def send_resumable(
    store: ObjectStore,
    path: Path,
    name: str,
    *,
    part_bytes: int,
    note: SendNote | None,
    on_sent: Callable[[int], None],
) -> None:
    """Write a file as the object `name`, and go on with the session that the note has. Raises StorageError, OSError."""
    noted = {} if note is None else note.read()
    size = path.stat().st_size
    uri = str(noted.get("session", "")) if noted.get("num_bytes") == size else ""
    for _ in range(SESSIONS):
        session = _Session(store, name, path, size=size, part_bytes=part_bytes)
        if uri:
            session.uri = uri
        else:
            session.begin()
            if note is not None:
                note.write({"session": session.uri, "num_bytes": size})
        try:
            while not session.is_done:
                on_sent(store.request("write a part of", name, session.advance))
            return
        except FileNotFoundError:
            uri = ""
    raise StorageError(f"{store.where(name)} was not written: the store has forgotten {SESSIONS} uploads of it")


class _Session:
    """One upload of one file."""

    def __init__(self, store: ObjectStore, name: str, path: Path, *, size: int, part_bytes: int) -> None:
        self.uri, self.is_done = "", False
        self._store, self._name, self._path, self._size = store, name, path, size
        self._part_bytes = max(UNIT_BYTES, part_bytes - part_bytes % UNIT_BYTES)
        self._at: int | None = None  # bytes that the store has; None: it is to be asked

    def begin(self) -> None:
        """Begin a new one."""
        files = self._store.files
        bucket, key = self._store.bucket_and_key(self._name)

        async def ask() -> Any:
            return await files._call(
                "POST",
                f"{files._location}/upload/storage/v1/b/{{}}/o",
                bucket,
                uploadType="resumable",
                name=key,
                json={"name": key},
                headers={"X-Upload-Content-Length": str(self._size)},
            )

        headers, _ = self._store.request("begin to write", self._name, self._store.run_async, ask)
        self.uri, self._at = str(headers["Location"]), 0

    def advance(self) -> int:
        """Send the next part, in one request; returns its bytes. FileNotFoundError: the store has forgotten all."""
        if self._at is None:
            self._answered(*self._put(f"bytes */{self._size}", b""))
            if self.is_done or self._at is None:
                return 0
        start, self._at = self._at, None
        with open(self._path, "rb") as file:
            data = os.pread(file.fileno(), min(self._part_bytes, self._size - start), start)
        if len(data) != min(self._part_bytes, self._size - start):
            raise StorageError(f"{self._path} has become shorter while it was sent")
        self._answered(*self._put(f"bytes {start}-{start + len(data) - 1}/{self._size}", data))
        return len(data)

    def _put(self, content_range: str, data: bytes) -> tuple[int, Mapping[str, str]]:
        files = self._store.files
        try:
            status, headers, _, _ = self._store.run_async(
                files._request, "PUT", self.uri, headers={"Content-Range": content_range}, data=data
            )
        except Exception as error:
            if str(getattr(error, "code", "")) in GONE:
                raise FileNotFoundError(self.uri) from error
            raise
        return int(status), headers

    def _answered(self, status: int, headers: Mapping[str, str]) -> None:
        """Take what the store has: all (200, 201), or so many bytes (308), of which whole units count."""
        if status in (200, 201):
            self.is_done = True
        elif status == 308:
            end = int(headers["Range"].rpartition("-")[2]) + 1 if "Range" in headers else 0
            self._at = end - end % UNIT_BYTES
        else:
            raise OSError(f"status {status} of an upload in parts")
