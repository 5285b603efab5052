"""Sends files to a store: small ones in one request, large ones in parts, of which those that are there stay.

A store keeps the parts of an upload that was broken off. The number of that upload is noted beside the file, so a later
process asks which parts are there, and sends the others: in any order on S3 and Azure, one after the other on Google
Cloud Storage. Stores without such parts get the whole file again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.storage.object_store import ObjectStore
from paceline.storage.resumable_upload import SendNote, send_resumable
from paceline.storage.retries import StorageError
from paceline.storage.uploads_in_parts import PartUpload, part_upload

__all__ = ["PART_BYTES", "FileSender", "SendNote", "part_size"]

PART_BYTES = 16 << 20
LEAST_PART_BYTES = 5 << 20  # S3's own limit, but for the last part
MOST_PARTS = 10_000  # S3's own
THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    number: int  # from 1
    start: int
    end: int


def part_size(num_bytes: int, least: int = PART_BYTES) -> int:
    """Return the bytes of a part, so that a file has no more parts than S3 takes; whole mebibytes."""
    needed = -(-num_bytes // MOST_PARTS)
    return max(least, -(-needed // (1 << 20)) << 20)


class FileSender:
    """Sends files with a few requests at once. `on_sent` hears the bytes of each request, in any thread."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        part_bytes: int = PART_BYTES,
        threads: int = THREADS,
        on_sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._store, self._part_bytes, self._on_sent = store, part_bytes, on_sent
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="upload")

    def close(self) -> None:
        """End the threads; what has not begun is left out."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def send(self, path: Path, name: str, note: SendNote | None = None) -> None:
        """Write a file as the object `name`; returns when it is there in full size. Raises StorageError, OSError."""
        num_bytes = path.stat().st_size
        if not self._store.family:
            self._store.send(name, str(path))
            self._on_sent(num_bytes)
        elif num_bytes <= self._part_bytes:
            self._store.write(name, path.read_bytes())
            self._on_sent(num_bytes)
        elif self._store.family == "gs":
            send_resumable(self._store, path, name, part_bytes=self._part_bytes, note=note, on_sent=self._on_sent)
        else:
            self._send_parts(path, name, num_bytes, note)
        found = self._store.size(name)
        if found != num_bytes:
            raise StorageError(f"{self._store.where(name)} has {found} bytes after {num_bytes} were sent")

    def send_small(self, path: Path, name: str) -> concurrent.futures.Future[None]:
        """Have a thread send a file; the result raises what `send` does."""
        return self._pool.submit(self.send, path, name)

    def is_small(self, path: Path) -> bool:
        """Whether one request is enough."""
        return path.stat().st_size <= self._part_bytes

    def _send_parts(self, path: Path, name: str, num_bytes: int, note: SendNote | None) -> None:
        upload = part_upload(self._store, name)
        noted = {} if note is None else note.read()
        size = part_size(num_bytes, self._part_bytes)
        there: dict[int, tuple[str, int]] = {}
        is_of_this = noted.get("part_bytes") == size and noted.get("num_bytes", num_bytes) == num_bytes
        if noted.get("upload_id") and is_of_this:
            there = upload.go_on(str(noted["upload_id"]))
        if not upload.upload_id:
            upload.begin()
            if note is not None:
                note.write({"upload_id": upload.upload_id, "part_bytes": size, "num_bytes": num_bytes})
        tags: dict[int, str] = {}
        missing = list[_Part]()
        for part in _parts(num_bytes, size):
            tag, length = there.get(part.number, ("", -1))
            if length == part.end - part.start:
                tags[part.number] = tag
            else:
                missing.append(part)
        tasks = {self._pool.submit(self._send_part, upload, path, part): part for part in missing}
        try:
            for done in concurrent.futures.as_completed(tasks):
                tags[tasks[done].number] = done.result()
        finally:
            for task in tasks:
                task.cancel()
            concurrent.futures.wait(tasks)
        upload.complete(tags)

    def _send_part(self, upload: PartUpload, path: Path, part: _Part) -> str:
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), part.end - part.start, part.start)
        if len(data) != part.end - part.start:
            raise OSError(f"{path} has become shorter while it was sent")
        tag = upload.send(part.number, data)
        self._on_sent(len(data))
        return tag


def _parts(num_bytes: int, size: int) -> Iterator[_Part]:
    for number, start in enumerate(range(0, num_bytes, size), start=1):
        yield _Part(number=number, start=start, end=min(start + size, num_bytes))
