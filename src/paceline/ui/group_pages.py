"""What the pages of pools and sweeps ask for: one stream for each, and a pool's run taken out where that is allowed."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import clock
from paceline.ui.event_stream import EventStream, Seen, Streams
from paceline.ui.runs_folder import RunsFolder

__all__ = ["GroupPages"]

EVERY_S = 0.5
MOST_KEPT = 64  # pools whose last answer is kept

Read = Callable[..., Awaitable[Any]]


class GroupPages:
    """`in_thread(call)` calls in the one thread that reads, where `look()` has the folder looked at."""

    def __init__(self, folder: RunsFolder, streams: Streams, *, look: Callable[[], None], in_thread: Read) -> None:
        self._folder, self._streams, self._look, self._in_thread = folder, streams, look, in_thread
        self._pools: dict[str, tuple[int, int, dict[str, Any]]] = {}  # revision, of which look, and what was told

    def routes(self) -> list[Route]:
        return [Route("/api/pool/stream", self._pool_stream), Route("/api/sweep/stream", self._sweep_stream)]

    async def _pool_stream(self, request: Request) -> Response:
        name = request.query_params.get("pool", "")
        return await self._stream(request, functools.partial(self._changed_pool, name), self._is_pool(name))

    async def _sweep_stream(self, request: Request) -> Response:
        name = request.query_params.get("sweep", "")
        return await self._stream(request, functools.partial(self._changed_sweep, name), self._is_sweep(name))

    async def _stream(
        self, request: Request, changes: Callable[[Seen], Awaitable[dict[str, Any] | None]], is_there: Awaitable[bool]
    ) -> Response:
        if not await is_there:
            raise HTTPException(404, "there is nothing of this name")
        seen = self._streams.seen(request.headers.get("last-event-id"), 1)
        return EventStream(self._streams, changes, seen=seen, every_s=EVERY_S)

    async def _is_pool(self, name: str) -> bool:
        await self._in_thread(self._look)
        return self._folder.pool_dir(name) is not None

    async def _is_sweep(self, name: str) -> bool:
        await self._in_thread(self._look)
        return self._folder.has_sweep(name)

    async def _changed_pool(self, name: str, seen: Seen) -> dict[str, Any] | None:
        return await self._in_thread(lambda: self._told_pool(name, seen[0]))

    def _told_pool(self, name: str, seen: int) -> dict[str, Any] | None:
        self._look()
        known = self._pools.get(name)
        if known is None or known[1] != self._folder.revision:
            found = self._folder.pool(name)
            if found is None:
                return None if seen < 0 else {"is_gone": True, "revisions": [-1]}
            is_new = known is None or known[2] != found
            revision = (known[0] if known is not None else 0) + is_new
            if len(self._pools) >= MOST_KEPT:
                self._pools.pop(next(iter(self._pools)))
            self._pools[name] = known = (revision, self._folder.revision, found)
        revision, _, found = known
        return None if revision == seen else found | {"now": clock.now(), "revisions": [revision]}

    async def _changed_sweep(self, name: str, seen: Seen) -> dict[str, Any] | None:
        def told() -> dict[str, Any] | None:
            self._look()
            if not self._folder.has_sweep(name):
                return None if seen[0] < 0 else {"is_gone": True, "revisions": [-1]}
            return self._folder.sweep(name, max(0, seen[0]))

        return await self._in_thread(told)
