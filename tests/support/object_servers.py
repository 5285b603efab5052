"""A real S3 server (moto's) and, in front of it, a proxy that fails at random: by a seed, so that a test is repeatable.

The proxy answers with 500 and 503 in the server's place, cuts connections before and within an answer, swallows answers
of requests that were carried out, and is slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from network_hosts import free_port

__all__ = ["CREDENTIALS", "FaultyProxy", "faulty_proxy", "s3_server"]

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret-never-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
}
STARTS_S = 60.0


@contextlib.contextmanager
def s3_server(*buckets: str) -> Iterator[str]:
    """Run a server with these buckets until the end of the block; yields its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + STARTS_S
        for bucket in buckets:
            while not _makes_bucket(port, bucket):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"moto's server has not started (status {process.poll()})")
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _makes_bucket(port: int, bucket: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(
            "PUT", f"/{bucket}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/x/us-east-1/s3"}
        )
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@dataclasses.dataclass
class FaultyProxy:
    """What the proxy does, which a test may change, and what it has seen."""

    url: str = ""
    rate: float = 0.0  # of requests that go wrong
    is_away: bool = False  # every request finds the connection closed
    pause_s: float = 0.0  # before each request is passed on
    most_part_bytes: int | None = None  # larger requests than this one are held up until `let_go` is set
    num_large: int = 0  # of these that are passed on before
    held_s: float = 60.0  # then the connection of such a request is closed
    let_go: threading.Event = dataclasses.field(default_factory=threading.Event)
    held: threading.Event = dataclasses.field(default_factory=threading.Event)  # set once one is held up
    requests: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # method and path of each
    body_bytes: int = 0  # that were passed on
    answers: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)  # to GET: path, Range, bytes
    num_faults: int = 0

    def count(self, method: str, text: str) -> int:
        """Return how many requests of a method have a text in their path."""
        return sum(one == method and text in path for one, path in list(self.requests))


@contextlib.contextmanager
def faulty_proxy(server: str, *, seed: int = 0) -> Iterator[FaultyProxy]:
    """Run a proxy in threads of this process until the end of the block."""
    proxy, drawn, lock = FaultyProxy(), random.Random(seed), threading.Lock()
    host, _, port = server.removeprefix("http://").partition(":")

    class _Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            self.close_connection = True  # so that none is left open at the end
            with lock:
                proxy.requests.append((self.command, self.path))
                fault = drawn.choice(FAULTS) if drawn.random() < proxy.rate else ""
                proxy.num_faults += bool(fault)
            body = self._body()
            if proxy.is_away or fault == "cut":
                return
            if fault in ("500", "503"):
                self._answer(int(fault), {"Content-Type": "application/xml"}, ERRORS[fault])
                return
            if self._is_held(len(body)):
                proxy.held.set()
                proxy.let_go.wait(proxy.held_s)
                return
            time.sleep(0.3 if fault == "slow" else proxy.pause_s)
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            try:
                connection.request(self.command, self.path, body, {**self.headers, "Connection": "close"})
                reply = connection.getresponse()
                data = reply.read()
            finally:
                connection.close()
            with lock:
                proxy.body_bytes += len(body)
                if self.command == "GET":
                    path, span = self.path.partition("?")[0], self.headers.get("Range", "")
                    proxy.answers.append((path, span, len(data)))
            if fault == "lost answer":
                return
            self._answer(reply.status, dict(reply.getheaders()), data, cut=fault == "cut answer")

        def _is_held(self, num_bytes: int) -> bool:
            if proxy.most_part_bytes is None or num_bytes <= proxy.most_part_bytes or proxy.let_go.is_set():
                return False
            with lock:
                proxy.num_large -= 1
                return proxy.num_large < 0

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return data

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            told = {name.lower(): value for name, value in headers.items()}.get("content-length")
            length = told if told is not None and self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length)
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # as http.server names them

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class _Server(http.server.ThreadingHTTPServer):
        daemon_threads = False
        block_on_close = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients go away: that is tested

    with _Server(("127.0.0.1", free_port()), _Handler) as served:
        proxy.url = f"http://127.0.0.1:{served.server_port}"
        thread = threading.Thread(target=served.serve_forever, args=(0.05,), name="faulty proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.let_go.set()
            served.shutdown()
            thread.join()


FAULTS = ("500", "503", "cut", "cut answer", "lost answer", "slow")
ERRORS = {
    "500": b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
    "503": b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
}
