"""Servers of the three stores behind one description: moto's for S3, an emulator of Google's, and Azurite for Azure.

A test that takes a `BucketServer` says nothing of the store: it asks for an address, and for the environment variables
with which the store's package finds the server, or the proxy in front of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from network_hosts import free_port
from object_servers import CREDENTIALS, s3_server

__all__ = ["STORES", "BucketServer", "bucket_server"]

STORES = ("s3", "gs", "az")
STARTS_S = 120.0
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's, public
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketServer:
    """A server with one bucket, `bucket`."""

    store: str
    url: str

    def address(self, *names: str) -> str:
        """Return the address of something in the bucket."""
        return f"{self.store}://bucket/" + "/".join(names)

    def environment(self, url: str | None = None) -> Mapping[str, str]:
        """Return the variables with which a process finds the server, or a proxy at `url`."""
        url = url or self.url
        if self.store == "s3":
            return {**CREDENTIALS, "AWS_ENDPOINT_URL": url}
        if self.store == "gs":
            return {"STORAGE_EMULATOR_HOST": url, "NO_GCE_CHECK": "true"}
        return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(url)}


def connection_string(url: str, *, key: str = AZURE_KEY) -> str:
    """Return how Azure's packages are told of a server, and of its one account."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};"
        f"BlobEndpoint={url}/devstoreaccount1;"
    )


@contextlib.contextmanager
def bucket_server(store: str, folder: Path) -> Iterator[BucketServer]:
    """Run a store's server, which keeps its files in `folder`, until the end of the block."""
    if store == "s3":
        with s3_server("bucket") as url:
            yield BucketServer(store=store, url=url)
        return
    port = free_port()
    words = _google(port) if store == "gs" else _azure(port, folder)
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    server = BucketServer(store=store, url=f"http://127.0.0.1:{port}")
    try:
        _await_answer(process, port, folder / "server.log")
        if store == "az":
            _make_container(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _google(port: int) -> list[str]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    words = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "bucket"]
    return [sys.executable, "-m", "gcp_storage_emulator", *words]


def _azure(port: int, folder: Path) -> list[str]:
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs azurite-blob: tests/system_packages.sh engines installs it, as root")
    words = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    return [program, *words, "--skipApiVersionCheck", "--disableTelemetry"]


def _await_answer(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + STARTS_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the server has not started (status {process.poll()}): {log.read_text()[-2000:]}")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        return bool(connection.getresponse().status)
    except OSError:
        return False
    finally:
        connection.close()


def _make_container(server: BucketServer) -> None:
    import azure.storage.blob as blob  # pyright: ignore[reportMissingImports]

    with blob.BlobServiceClient.from_connection_string(connection_string(server.url)) as client:
        client.create_container("bucket")
