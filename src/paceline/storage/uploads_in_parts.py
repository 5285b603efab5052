"""Uploads in parts that may come in any order: S3's multi-part uploads, and the blocks of Azure's blobs.

An upload has a number. Its parts stay in the store until they are put together, so a later process that knows the
number asks which are there, and sends the others.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from paceline.storage.object_store import ObjectStore
from paceline.storage.packages import ANSWER_S, CONNECT_S
from paceline.storage.retries import StorageError

__all__ = ["BlockUpload", "MultipartUpload", "PartUpload", "abort_uploads", "part_upload"]


class PartUpload(Protocol):
    """One upload of one object."""

    upload_id: str

    def begin(self) -> None:
        """Begin a new one."""
        ...

    def go_on(self, upload_id: str) -> dict[int, tuple[str, int]]:
        """Go on with one that was begun before: returns tag and bytes of each part that is there.

        Where it is not there any more, or may not be asked for, nothing is returned, and a new one is to be begun.
        """
        ...

    def send(self, number: int, data: bytes) -> str:
        """Send one part; returns its tag."""
        ...

    def complete(self, tags: Mapping[int, str]) -> None:
        """Make one object of the parts."""
        ...


def part_upload(store: ObjectStore, name: str) -> PartUpload:
    """Return the upload of an object, as its store has it: S3 or Azure."""
    return MultipartUpload(store, name) if store.family == "s3" else BlockUpload(store, name)


class MultipartUpload:
    """One upload in parts, of one object of S3."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.upload_id = ""
        self._store, self._name = store, name
        bucket, key = store.bucket_and_key(name)
        self._place = {"Bucket": bucket, "Key": key}

    def begin(self) -> None:
        """Begin a new one."""
        self.upload_id = str(self._request("begin to write", "create_multipart_upload")["UploadId"])

    def go_on(self, upload_id: str) -> dict[int, tuple[str, int]]:
        """Ask for its parts, page by page."""
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


class BlockUpload:
    """Blocks of one blob of Azure: the number is a part of their names, so that those of other uploads are none."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.upload_id = ""
        self._store, self._name = store, name
        self._container, self._key = store.bucket_and_key(name)

    def begin(self) -> None:
        """Choose a number: the store need not be asked."""
        self.upload_id = uuid.uuid4().hex

    def go_on(self, upload_id: str) -> dict[int, tuple[str, int]]:
        """Ask for its blocks; those that are in the blob already count, where only the answer to that was lost."""
        self.upload_id = upload_id
        try:
            lists = self._request("list the parts of", "get_block_list", "all")
        except FileNotFoundError:
            return {}
        found: dict[int, tuple[str, int]] = {}
        for block in (one for each in lists for one in each or ()):
            upload, _, number = str(block.id).partition("-")
            if upload == upload_id and number.isdecimal():
                found[int(number)] = str(block.id), int(block.size)
        return found

    def send(self, number: int, data: bytes) -> str:
        """Send one block; returns its name, which is as long as all others: Azure asks for that."""
        block = f"{self.upload_id}-{number:05d}"
        self._request("write a part of", "stage_block", block, data, length=len(data))
        return block

    def complete(self, tags: Mapping[int, str]) -> None:
        """Make one blob of the blocks. Where it was that already, the same blocks are found again."""
        self._request("put together", "commit_block_list", [tags[number] for number in sorted(tags)])

    def _request(self, what: str, method: str, *arguments: Any, **named: Any) -> Any:
        async def ask() -> Any:
            async with self._store.files.service_client.get_blob_client(self._container, self._key) as blob:
                return await getattr(blob, method)(
                    *arguments, **named, connection_timeout=CONNECT_S, read_timeout=ANSWER_S
                )

        return self._store.request(what, self._name, self._store.run_async, ask)


def abort_uploads(store: ObjectStore, is_orphan: Callable[[str], bool]) -> list[str]:
    """Abort uploads in parts that nobody will finish, of objects whose names are orphans'; returns these names.

    Where they may not be listed, nothing is done. Google's and Azure's stores forget them after a week.
    """
    aborted: list[str] = []
    if store.family != "s3":
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
