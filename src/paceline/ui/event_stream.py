"""Server-sent events: what has changed, as long as a browser listens; every wait has a limit.

A browser that has gone, or reads nothing for `SEND_S`, ends its stream; so does the end of the server, at once. A
browser that comes back says what it has seen last, and gets only what it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["EventStream", "Seen", "Streams", "Told", "json_text", "told"]

Seen = tuple[int, ...]


class Told(NamedTuple):
    """A message, and the revisions that a browser has seen with it."""

    seen: Seen
    text: str


Changes = Callable[[Seen], Awaitable[Told | None]]

MOST_STREAMS = 64
SEND_S = 10.0
STILL_HERE_S = 15.0  # a word at least so often: proxies close a silent connection
RETRY_MS = 1000  # until a browser comes back
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Streams:
    """All streams of a server; `close` ends them."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.boot = secrets.token_hex(4)  # what a browser has seen of another server counts for nothing
        self.num_open = 0

    def close(self) -> None:
        self.closing.set()

    def seen(self, last_event_id: str | None, num: int) -> Seen:
        """The revisions that a browser names; zeros where it has seen nothing of this server."""
        boot, _, rest = (last_event_id or "").partition(".")
        words = rest.split(".")
        known = boot == self.boot and len(words) == num and all(word.isdecimal() and len(word) < 16 for word in words)
        return tuple(map(int, words)) if known else (0,) * num


class EventStream(Response):
    """Sends what `changes(seen)` returns, every `every_s`."""

    def __init__(self, streams: Streams, changes: Changes, *, seen: Seen, every_s: float) -> None:
        super().__init__()
        self._streams, self._changes, self._seen, self._every_s = streams, changes, seen, every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._streams.num_open >= MOST_STREAMS or self._streams.closing.is_set():
            await Response("too many pages are open", status_code=503)(scope, receive, send)
            return
        self._streams.num_open += 1
        gone = asyncio.create_task(_gone(receive))
        closing = asyncio.create_task(_wait(self._streams.closing))
        try:
            await _within(send({"type": "http.response.start", "status": 200, "headers": HEADERS}))
            await self._send(send, f"retry: {RETRY_MS}\n\n")
            await self._go_on(send, {gone, closing})
            await self._send(send, "", more=False)
        except (TimeoutError, OSError):  # it reads nothing, or has gone
            return
        finally:
            self._streams.num_open -= 1
            for task in (gone, closing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _go_on(self, send: Send, ends: set[asyncio.Task[None]]) -> None:
        said_s = time.monotonic()
        while not any(task.done() for task in ends):
            found = await self._changes(self._seen)
            if found is not None:
                self._seen = found.seen
                number = ".".join(map(str, (self._streams.boot, *self._seen)))
                await self._send(send, f"id: {number}\ndata: {found.text}\n\n")
                said_s = time.monotonic()
            elif time.monotonic() - said_s > STILL_HERE_S:
                await self._send(send, ": still here\n\n")
                said_s = time.monotonic()
            await asyncio.wait(ends, timeout=self._every_s, return_when=asyncio.FIRST_COMPLETED)

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        await _within(send({"type": "http.response.body", "body": text.encode(), "more_body": more}))


def told(found: dict[str, Any] | None) -> Told | None:
    """Return the message of these facts, of which `revisions` becomes what was seen. To be called where the facts are
    read: it takes long where they are many."""
    return None if found is None else Told(tuple(found["revisions"]), json_text(found))


def json_text(found: Any) -> str:
    """Return JSON without line ends; numbers that are not finite are refused."""
    return json.dumps(found, allow_nan=False, separators=(",", ":"))


async def _within(sent: Awaitable[None]) -> None:
    async with asyncio.timeout(SEND_S):
        await sent


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
