"""Sends files to a store: small ones in one request, large ones in parts, of which those that are there stay.

S3 keeps the parts of an upload that was broken off. The number of that upload is noted beside the file, so a later
process asks which parts are there, and sends the others. Stores without such parts get the whole file again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

__all__ = ["PART_BYTES", "FileSender", "SendNote", "abort_uploads", "part_size"]

PART_BYTES = 16 << 20
LEAST_PART_BYTES = 5 << 20  # S3's own limit, but for the last part
MOST_PARTS = 10_000  # S3's own
THREADS = 4


class SendNote(Protocol):
    """What is remembered of one file's upload, until it is done."""

    def read(self) -> Mapping[str, Any]: ...

    def write(self, fields: Mapping[str, Any]) -> None: ...


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
        if not self._store.is_s3:
            self._store.send(name, str(path))
            self._on_sent(num_bytes)
        elif num_bytes <= self._part_bytes:
            self._store.write(name, path.read_bytes())
            self._on_sent(num_bytes)
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
        upload = _Upload(self._store, name)
        noted = {} if note is None else note.read()
        size = part_size(num_bytes, self._part_bytes)
        there: dict[int, tuple[str, int]] = {}
        if noted.get("upload_id") and noted.get("part_bytes") == size:
            there = upload.go_on(str(noted["upload_id"]))
        if not upload.upload_id:
            upload.begin()
            if note is not None:
                note.write({"upload_id": upload.upload_id, "part_bytes": size})
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

    def _send_part(self, upload: _Upload, path: Path, part: _Part) -> str:
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


class _Upload:
    """One upload in parts, of one object of S3."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.upload_id = ""
        self._store, self._name = store, name
        bucket, _, key = store.path(name).partition("/")
        self._place = {"Bucket": bucket, "Key": key}

    def begin(self) -> None:
        """Begin a new one."""
        self.upload_id = str(self._request("begin to write", "create_multipart_upload")["UploadId"])

    def go_on(self, upload_id: str) -> dict[int, tuple[str, int]]:
        """Go on with one that was begun before: returns tag and bytes of each part that is there.

        Where it is not there any more, or may not be asked for, nothing is returned, and a new one is to be begun.
        """
        found: dict[int, tuple[str, int]] = {}
        marker = 0
        while True:
            try:
                page = self._request(
                    "list the parts of",
                    "list_parts",
                    UploadId=upload_id,
                    **({"PartNumberMarker": marker} if marker else {}),
                )
            except FileNotFoundError:
                return {}
            except StorageError as error:
                if isinstance(error.__cause__, PermissionError) or "NoSuchUpload" in str(error):
                    return {}
                raise
            for part in page.get("Parts", ()):
                found[int(part["PartNumber"])] = str(part["ETag"]), int(part["Size"])
            if not page.get("IsTruncated"):
                self.upload_id = upload_id
                return found
            marker = int(page["NextPartNumberMarker"])

    def send(self, number: int, data: bytes) -> str:
        """Send one part; returns its tag."""
        arguments = {"PartNumber": number, "UploadId": self.upload_id, "Body": data}
        return str(self._request("write a part of", "upload_part", **arguments)["ETag"])

    def complete(self, tags: Mapping[int, str]) -> None:
        """Make one object of the parts."""
        parts = [{"PartNumber": number, "ETag": tags[number]} for number in sorted(tags)]
        try:
            self._request(
                "put together", "complete_multipart_upload", UploadId=self.upload_id, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError:  # the answer to an earlier try was lost, or another host was faster: sizes will tell
            return
        except StorageError as error:
            if "NoSuchUpload" not in str(error):
                raise

    def _request(self, what: str, method: str, **arguments: Any) -> Any:
        return self._store.request(what, self._name, self._store.s3, method, **self._place, **arguments)


def abort_uploads(store: ObjectStore, is_orphan: Callable[[str], bool]) -> list[str]:
    """Abort uploads in parts that nobody will finish, of objects whose names are orphans'; returns these names.

    Where the store has no such uploads, or they may not be listed, nothing is done.
    """
    aborted: list[str] = []
    if not store.is_s3:
        return aborted
    bucket, _, folder = store.root.partition("/")
    for key, upload_id in list(_unfinished(store, bucket, f"{folder}/")):
        name = key.removeprefix(f"{folder}/")
        if is_orphan(name):
            try:
                store.request(
                    "abort an upload of",
                    name,
                    store.s3,
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=key,
                    UploadId=upload_id,
                )
            except (FileNotFoundError, StorageError):
                continue
            aborted.append(name)
    return aborted


def _unfinished(store: ObjectStore, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    marker: dict[str, str] = {}
    while True:
        try:
            page = store.request(
                "list unfinished uploads of",
                "",
                store.s3,
                "list_multipart_uploads",
                Bucket=bucket,
                Prefix=prefix,
                **marker,
            )
        except (FileNotFoundError, StorageError):
            return
        for one in page.get("Uploads", ()):
            yield str(one["Key"]), str(one["UploadId"])
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
