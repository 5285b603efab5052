"""A store of objects, by fsspec: list, read, write and delete below one address, each request tried a few times.

Writing an object is atomic in every store: it is there whole, or as before. Nothing else is: there is no rename, and
no two objects change together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import fsspec

from paceline.storage.address import LOCAL, joined
from paceline.storage.retries import BoundedRetries, StorageError

__all__ = ["REQUEST_S", "ObjectInfo", "ObjectStore"]

T = TypeVar("T")
P = ParamSpec("P")
REQUEST_S = 600.0  # one request with its body; a connection that stands still does not keep a thread for ever
CONNECT_S, ANSWER_S = 10, 60


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
        protocol = address.partition("://")[0]
        self.is_s3 = protocol in ("s3", "s3a")
        try:
            files, root = fsspec.url_to_fs(
                self.address, **_options(protocol, self.is_s3), skip_instance_cache=True, use_listings_cache=False
            )
        except (ImportError, OSError, ValueError) as error:
            raise StorageError(f"{address} cannot be used: {type(error).__name__}: {error}") from error
        self.files: Any = files
        if self.is_s3:
            self.files.retries = 1  # tries are counted here, and once
        self.root = str(root).rstrip("/")

    def path(self, name: str) -> str:
        """The object's path as fsspec takes it."""
        return joined(self.root, name) if name else self.root

    def where(self, name: str) -> str:
        """The object's address, for people."""
        return joined(self.address, name) if name else self.address

    def listed(self, folder: str = "") -> list[ObjectInfo]:
        """Return all objects below a folder, in any depth; none where there is no such folder."""

        def find() -> Mapping[str, Mapping[str, Any]]:
            try:
                return self.files.find(self.path(folder), detail=True)
            except FileNotFoundError:
                self._refuse_missing_bucket()
                return {}

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
            if self.is_s3:
                bucket, _, key = self.path(name).partition("/")
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
        """Raise where not the folder, but the bucket is absent; S3 tells these apart."""
        if self.is_s3:
            bucket = self.root.partition("/")[0]
            try:
                self.s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
            except FileNotFoundError as error:
                raise StorageError(
                    f"there is no bucket {bucket!r} for {self.address}: make it first, or correct its name."
                ) from error


def _options(protocol: str, is_s3: bool) -> dict[str, Any]:
    """What the package is given beside the user's own settings (FSSPEC_* variables and files), which win."""
    if protocol in LOCAL:
        return {"auto_mkdir": True}
    if not is_s3:
        return {}
    from fsspec.config import conf

    given: Mapping[str, Any] = conf.get(protocol, {}).get("config_kwargs", {})
    own = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S, "retries": {"total_max_attempts": 1}}
    return {"config_kwargs": {**own, **given}}
