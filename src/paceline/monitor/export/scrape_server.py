"""Answers HTTP requests for metrics in one thread; silent and slow connections cost a socket each, and nobody waits.

No connection is trusted. There are `MOST_OPEN` at most: beyond that, the address that has most of them loses its
oldest. Each has `SCRAPE_TIMEOUT_S` from its first byte to the last of the answer.
"""

from __future__ import annotations

import contextlib
import io
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.comm.messages.unproved_connections import ByAddress
from paceline.errors import LaunchError

__all__ = ["ScrapeServer"]

SCRAPE_TIMEOUT_S = 5.0
MOST_OPEN = 64
MOST_BYTES = 1 << 14  # of a request's head
ACCEPTS_AT_ONCE = 64
TURN_S = 0.1  # between two looks at the clock


class ScrapeServer:
    """Listens on `host:port` (0: any free port) until `close()`. Raises LaunchError if it cannot."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self._server = _listen(host, port)
        served = CollectorRegistry(auto_describe=False)
        served.register(_WithoutCreated(registry))
        self._server.set_app(make_wsgi_app(served))
        self.port = self._server.server_port
        self._listener = self._server.socket
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._open = ByAddress[_Scrape]()
        self._num_accepted = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; scrapes under way are cut."""
        self._is_closed = True
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(TURN_S):
                if key.data is None:
                    self._accept()
                elif key.data.sock.fileno() >= 0:  # it may have been driven out in this turn
                    self._go_on(key.data)
            now = time.monotonic()
            for scrape in [one for one in self._open.all() if one.until < now]:
                self._end(scrape)
        for scrape in self._open.all():
            self._end(scrape)
        self._selector.close()
        self._server.server_close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except ConnectionError:
                continue  # it went away before it was let in
            except BlockingIOError:
                return
            except OSError:  # no more files
                if not len(self._open):
                    time.sleep(TURN_S)  # the listener stays readable, and nothing here can be closed: do not spin
                    return
                self._end(self._open.pop_oldest()[1])
                return
            if len(self._open) >= MOST_OPEN:
                self._end(self._open.pop_oldest()[1])
            self._num_accepted += 1
            sock.setblocking(False)
            scrape = _Scrape(sock, self._num_accepted)
            self._open.add(scrape.number, str(peer[0]), scrape)
            self._selector.register(sock, selectors.EVENT_READ, scrape)

    def _go_on(self, scrape: _Scrape) -> None:
        try:
            if not scrape.is_whole:
                data = scrape.sock.recv(MOST_BYTES)
                scrape.take(data)
                if not data and not scrape.is_whole:
                    self._end(scrape)
                    return
                if scrape.is_whole:
                    scrape.answer = self._answer(bytes(scrape.request))
                    self._selector.modify(scrape.sock, selectors.EVENT_WRITE, scrape)
            if scrape.is_whole:
                del scrape.answer[: scrape.sock.send(scrape.answer)]
                if not scrape.answer:
                    self._end(scrape)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # it has gone
            self._end(scrape)

    def _answer(self, request: bytes) -> bytearray:
        exchange = _Exchange(request)
        with contextlib.suppress(Exception):  # of the WSGI server, about what a stranger sent: it gets no answer
            _QuietRequests(exchange, ("", 0), self._server)  # pyright: ignore[reportArgumentType]  # as a socket is used
        return exchange.answer

    def _end(self, scrape: _Scrape) -> None:
        self._open.pop(scrape.number)
        self._selector.unregister(scrape.sock)
        scrape.sock.close()


class _WithoutCreated(Collector):
    """A registry's series without `_created`: they double the counters, and no query needs them.

    The client library's own switch, `disable_created_metrics`, holds for the whole process, and so for other metrics of
    the calling program.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Scrape:
    """A connection: its request so far, or what is left to send."""

    __slots__ = ("answer", "is_whole", "number", "request", "sock", "until")

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock, self.number = sock, number
        self.until = time.monotonic() + SCRAPE_TIMEOUT_S
        self.request, self.answer = bytearray(), bytearray()
        self.is_whole = False  # the request has come, or more than any may have

    def take(self, data: bytes) -> None:
        self.request += data
        ends = (b"\r\n\r\n", b"\n\n")
        self.is_whole = any(end in self.request for end in ends) or len(self.request) > MOST_BYTES


class _Exchange:
    """What a request handler uses of a socket: a request that has come, and an answer that is kept."""

    def __init__(self, request: bytes) -> None:
        self._request, self.answer = request, bytearray()

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._request)

    def sendall(self, data: bytes) -> None:
        self.answer += data


class _QuietRequests(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not news."""

    def get_stderr(self) -> io.StringIO:
        """Errors of the WSGI application, about what a stranger sent, are not news either."""
        return io.StringIO()


class _BoundServer(WSGIServer):
    allow_reuse_port = False  # a second run on the same port is an error, not half of the scrapes

    def server_bind(self) -> None:
        """Bind without looking up the host's full name, as the base class does: that can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


def _listen(host: str, port: int) -> _BoundServer:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_FamilyServer", (_BoundServer,), {"address_family": family, "request_queue_size": 128})
        return kind((str(address[0]), port), _QuietRequests)
    except OSError as error:
        raise LaunchError(
            f"The metrics endpoint cannot listen on {host}:{port}: {error.strerror or error}. "
            "Use another metrics_port (0: any free one), or metrics_host=127.0.0.1."
        ) from error
