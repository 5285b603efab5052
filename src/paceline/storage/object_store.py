"""A store of objects, by fsspec: list, read, write and delete below one address, each request tried a few times.

Writing an object is atomic in every store: it is there whole, or as before. Nothing else is: there is no rename, and
no two objects change together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from paceline.storage.address import family_of, joined
from paceline.storage.package_errors import plain_error
from paceline.storage.packages import REQUEST_S, any_object, call_async, opened
from paceline.storage.retries import BoundedRetries, StorageError

__all__ = ["ObjectInfo", "ObjectStore"]

T = TypeVar("T")
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object of the store."""

    name: str  # below the store's address
    num_bytes: int


class ObjectStore:
    """Objects below one address. Names are relative to it; credentials come from where the store's package looks."""

    def __init__(self, address: str, *, retries: BoundedRetries | None = None) -> None:
        self.address = address.rstrip("/")
        self._retries = retries or BoundedRetries()
        self.family = family_of(self.address)  # "s3", "gs", "az", or "" for all others
        self.files, root = opened(self.address, self.family)
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        """The object's path as fsspec takes it."""
        return joined(self.root, name) if name else self.root

    def bucket_and_key(self, name: str) -> tuple[str, str]:
        """The bucket (of Azure: the container), and the object's whole name in it."""
        bucket, _, key = self.path(name).partition("/")
        return bucket, key

    def where(self, name: str) -> str:
        """The object's address, for people."""
        return joined(self.address, name) if name else self.address

    def listed(self, folder: str = "") -> list[ObjectInfo]:
        """Return all objects below a folder, in any depth; none where there is no such folder."""

        def find() -> Mapping[str, Mapping[str, Any]]:
            try:
                found = self.files.find(self.path(folder), detail=True)
            except FileNotFoundError:
                found = {}
            if not found:
                self._refuse_missing_bucket()
            return found

        found = self._call("list", folder, find)
        prefix = f"{self.root}/"
        return sorted(
            (
                ObjectInfo(name=path.removeprefix(prefix), num_bytes=int(about.get("size") or 0))
                for path, about in found.items()
                if path.startswith(prefix)
            ),
            key=lambda one: one.name,
        )

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return an object's bytes, or a part of them; FileNotFoundError where it is not there."""

        def cat() -> bytes:
            data = self.files.cat_file(self.path(name), start=start or None, end=end)
            if end is not None and len(data) != end - start:
                raise OSError(f"{len(data)} bytes came of {end - start}")  # the connection was cut
            return bytes(data)

        return self._call("read", name, cat)

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object, in one request."""

        def pipe() -> None:
            if self.family == "s3":
                bucket, key = self.bucket_and_key(name)
                self.s3("put_object", Bucket=bucket, Key=key, Body=data)
            else:
                self.files.pipe_file(self.path(name), data)

        self._written(name, pipe)

    def send(self, name: str, path: str) -> None:
        """Write a file's contents as one object, as the store's package does it."""
        self._written(name, functools.partial(self.files.put_file, path, self.path(name)))

    def size(self, name: str) -> int | None:
        """Return an object's bytes; None where it is not there."""
        try:
            return int(self._call("look at", name, lambda: self.files.info(self.path(name), refresh=True))["size"])
        except FileNotFoundError:
            return None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, one after the other; those that are not there are no error."""
        for name in names:
            try:
                self._call("delete", name, functools.partial(self.files.rm_file, self.path(name)))
            except FileNotFoundError:
                continue

    def request(self, what: str, name: str, request: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make another request with the same tries and errors."""
        return self._call(what, name, lambda: request(*args, **kwargs))

    def s3(self, method: str, **arguments: Any) -> Any:
        """One request of S3's own interface, not tried again."""
        return self.files.call_s3(method, timeout=REQUEST_S, **arguments)

    def run_async(self, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run one request of a package that speaks asynchronously, not tried again; returns when it is answered."""
        return call_async(self.files, request, *arguments, **named)

    def _call(self, what: str, name: str, request: Callable[[], T]) -> T:
        return self._retries.call(what, self.where(name), request)

    def _written(self, name: str, request: Callable[[], object]) -> None:
        try:
            self._call("write", name, request)
        except FileNotFoundError as error:
            raise StorageError(
                f"there is no place for {self.where(name)} ({error}): make the bucket first, or correct its name."
            ) from error

    def _refuse_missing_bucket(self) -> None:
        """Raise where not the folder, but the bucket is absent; packages do not tell these apart."""
        bucket = self.root.partition("/")[0]
        try:
            if self.family == "s3":
                self.s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
            elif self.family:
                self.run_async(any_object, self.files, self.family, bucket)
        except Exception as error:
            if not isinstance(plain_error(error), FileNotFoundError):
                raise
            raise StorageError(
                f"there is no bucket {bucket!r} for {self.address}: make it first, or correct its name."
            ) from error
