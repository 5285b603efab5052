"""The packages that speak to stores (s3fs, gcsfs, adlfs): opened so that tries are counted once.

Each of them tries a failed request again by itself, for minutes. Here that is switched off: `BoundedRetries` counts the
tries of every store alike. They are imported when an address names them, and at no other time.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from fsspec.asyn import sync

from paceline.storage.address import LOCAL
from paceline.storage.retries import SOURCES, StorageError

__all__ = ["ANSWER_S", "CONNECT_S", "REQUEST_S", "any_object", "call_async", "opened"]

REQUEST_S = 600.0  # one request with its body; a connection that stands still does not keep a thread for ever
CONNECT_S, ANSWER_S = 10, 60


def opened(address: str, family: str) -> tuple[Any, str]:
    """Return the package's file system of an address, and the address's path in it. Raises StorageError."""
    try:
        options = _options(address, family)
        if family == "gs":
            files, root = _google(address, options)
        else:
            files, root = fsspec.url_to_fs(address, **options)
    except (ImportError, OSError, ValueError) as error:
        remedy = f". Credentials are taken from: {SOURCES[family]}, or FSSPEC_* variables" if family else ""
        raise StorageError(f"{address} cannot be used: {type(error).__name__}: {error}{remedy}") from error
    if family == "s3":
        files.retries = 1
    elif family == "az":
        _try_once(files.service_client)
    return files, str(root)


def _options(address: str, family: str) -> dict[str, Any]:
    """What the package is given beside the user's own settings (FSSPEC_* variables and files), which win."""
    from fsspec.config import conf

    protocol = address.partition("://")[0]
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in LOCAL:
        return {**options, "auto_mkdir": True}
    given: Mapping[str, Any] = conf.get(protocol, {})
    if family == "s3":
        own = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S, "retries": {"total_max_attempts": 1}}
        options["config_kwargs"] = {**own, **given.get("config_kwargs", {})}
    elif family == "az":
        options |= {"connection_timeout": CONNECT_S, "read_timeout": ANSWER_S}
    elif family == "gs":
        limits = importlib.import_module("aiohttp").ClientTimeout(
            total=REQUEST_S, sock_connect=CONNECT_S, sock_read=ANSWER_S
        )
        options["requests_timeout"] = limits
    return {name: value for name, value in options.items() if name == "config_kwargs" or name not in given}


def _google(address: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """gcsfs over HTTP alone, as its requests come without its own tries.

    The class that it gives by default asks for a bucket's kind by gRPC before each request, for up to a minute where
    there is no answer, and gRPC's threads do not survive the fork of a data worker.
    """
    files = importlib.import_module("gcsfs.core").GCSFileSystem(**options)
    once = getattr(type(files)._request, "__wrapped__", None)
    if once is not None:
        files._request = types.MethodType(once, files)
    return files, files._strip_protocol(address)


def _try_once(client: Any) -> None:
    """Azure's client tries again three times, after fifteen seconds and more; all its blobs share these policies."""
    for policy in client._pipeline._impl_policies:
        if hasattr(policy, "total_retries"):
            policy.total_retries = 0


def call_async(files: Any, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run one coroutine in the package's event loop."""
    return sync(files.loop, request, *arguments, timeout=REQUEST_S, **named)


async def any_object(files: Any, family: str, bucket: str) -> None:
    """Ask for one name in a bucket of Google's or Azure's; raises where there is no such bucket."""
    if family == "gs":
        await files._call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
        return
    async with files.service_client.get_container_client(bucket) as container:
        async for _ in container.list_blob_names(results_per_page=1):
            return
