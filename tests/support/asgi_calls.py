"""Requests to an ASGI application without a network: what a browser would send, and what comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.ui.access import Access
from paceline.ui.server import UiServer

__all__ = ["Answer", "AsgiCalls", "talk"]

T = TypeVar("T")
LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class AsgiCalls:
    """Sends requests to the application of a `UiServer`."""

    def __init__(self, ui: UiServer, access: Access) -> None:
        self.ui, self.access = ui, access

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, body=b"", **headers)

    async def ask(self, method: str, path: str, *, body: bytes = b"", **headers: str) -> Answer:
        """Send a request; a header's name is written with "_"."""
        found: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            found.append(message)

        await self.ui.app(scope_of(method, path, headers), receiver(body), send)
        start, *rest = found
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(status=start["status"], headers=names, body=b"".join(one.get("body", b"") for one in rest))

    async def listen(self, path: str, num: int, *, then: Callable[[int], None] = lambda _: None, **headers: str) -> Any:
        """Listen to a stream until `num` messages have come, and go away; `then(k)` is called after the k-th one.
        Returns the messages, each with its `id`."""
        gone, found = asyncio.Event(), list[dict[str, Any]]()

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            for block in message.get("body", b"").decode().split("\n\n"):
                lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
                if "data" in lines:
                    found.append(json.loads(lines["data"]) | {"id": lines["id"]})
                    then(len(found))
            if len(found) >= num:
                gone.set()

        async with asyncio.timeout(LIMIT_S):
            await self.ui.app(scope_of("GET", path, headers), receive, send)
        return found


def talk(root: Path, conversation: Callable[[AsgiCalls], Awaitable[T]], **options: Any) -> T:
    """Have a conversation with a server over this folder, and end it. `options`: needs_token, is_local, can_control."""
    can_control = options.pop("can_control", False)
    values = {"needs_token": False, "is_local": True, "port": 7700} | options

    async def whole() -> T:
        access = Access(**values)
        ui = UiServer(root, access, can_control=can_control)
        ending, ended = asyncio.Event(), asyncio.Event()
        lifespan = asyncio.create_task(_lifespan(ui, ending, ended))
        try:
            async with asyncio.timeout(LIMIT_S):
                return await conversation(AsgiCalls(ui, access))
        finally:
            ui.streams.close()
            ending.set()
            async with asyncio.timeout(LIMIT_S):
                await ended.wait()
                await lifespan

    return asyncio.run(whole())


async def _lifespan(ui: UiServer, ending: asyncio.Event, ended: asyncio.Event) -> None:
    has_begun = False

    async def receive() -> Any:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            return {"type": "lifespan.startup"}
        await ending.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: Any) -> None:
        if message["type"].startswith("lifespan.shutdown"):
            ended.set()

    await ui.app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)


def scope_of(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    where, _, query = path.partition("?")
    named = {"host": "127.0.0.1:7700"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": where,
        "raw_path": where.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "server": ("127.0.0.1", 7700),
        "client": ("127.0.0.1", 50000),
    }


def receiver(body: bytes) -> Callable[[], Awaitable[Any]]:
    """What a server gives of a request: its body, and then nothing more."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    return receive
