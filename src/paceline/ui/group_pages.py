"""What the pages of pools and sweeps ask for: one stream for each, and a pool's run taken out where that is allowed."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline import clock
from paceline.ui.event_stream import EventStream, Seen, Streams, Told, told
from paceline.ui.reader import Reader
from paceline.ui.runs_folder import RunsFolder

__all__ = ["GroupPages"]

EVERY_S = 0.5
MOST_KEPT = 64  # pools whose last answer is kept


class GroupPages:
    """`look()`, as a reading, has the folder looked at."""

    def __init__(self, folder: RunsFolder, streams: Streams, *, look: Callable[[], None], reader: Reader) -> None:
        self._folder, self._streams, self._look, self._reader = folder, streams, look, reader
        self._pools: dict[str, _ToldPool] = {}

    def routes(self) -> list[Route]:
        return [Route("/api/pool/stream", self._pool_stream), Route("/api/sweep/stream", self._sweep_stream)]

    async def _pool_stream(self, request: Request) -> Response:
        name = request.query_params.get("pool", "")
        return await self._stream(request, functools.partial(self._changed_pool, name), self._is_pool(name))

    async def _sweep_stream(self, request: Request) -> Response:
        name = request.query_params.get("sweep", "")
        return await self._stream(request, functools.partial(self._changed_sweep, name), self._is_sweep(name))

    async def _stream(
        self, request: Request, changes: Callable[[Seen], Awaitable[Told | None]], is_there: Awaitable[bool]
    ) -> Response:
        if not await is_there:
            raise HTTPException(404, "there is nothing of this name")
        seen = self._streams.seen(request.headers.get("last-event-id"), 1)
        return EventStream(self._streams, changes, seen=seen, every_s=EVERY_S)

    async def _is_pool(self, name: str) -> bool:
        await self._reader.read(self._look)
        return self._folder.pool_dir(name) is not None

    async def _is_sweep(self, name: str) -> bool:
        await self._reader.read(self._look)
        return self._folder.has_sweep(name)

    async def _changed_pool(self, name: str, seen: Seen) -> Told | None:
        return await self._reader.read_often(("pool", name, any(seen)), lambda: told(self._pool_since(name, seen[0])))

    def _pool_since(self, name: str, seen: int) -> dict[str, Any] | None:
        self._look()
        known = self._pools.get(name)
        if known is None or known.of != self._folder.revision:
            found = self._folder.pool(name)
            if found is None:
                return None if seen < 0 else {"is_gone": True, "revisions": [-1]}
            if known is None:
                while len(self._pools) >= MOST_KEPT:
                    self._pools.pop(next(iter(self._pools)))
                known = self._pools[name] = _ToldPool()
            known.take(found, self._folder.revision)
        return known.changes(seen)

    async def _changed_sweep(self, name: str, seen: Seen) -> Told | None:
        return await self._reader.read_often(("sweep", name, any(seen)), lambda: told(self._sweep_since(name, seen[0])))

    def _sweep_since(self, name: str, seen: int) -> dict[str, Any] | None:
        self._look()
        if not self._folder.has_sweep(name):
            return None if seen < 0 else {"is_gone": True, "revisions": [-1]}
        return self._folder.sweep(name, max(0, seen))


class _ToldPool:
    """What a pool's page shows, each part and each run with the revision in which it changed last."""

    def __init__(self) -> None:
        self.of = 0  # the folder's revision that it was taken from
        self._revision = random.randrange(1 << 20)  # a page may have seen one that was dropped meanwhile
        self._born = self._revision + 1
        self._parts: dict[str, tuple[int, Any]] = {}
        self._runs: dict[str, tuple[int, Any]] = {}

    def take(self, found: Mapping[str, Any], of: int) -> None:
        """Take all facts, as they are now; in place of the list of runs, their names in order are a part."""
        self.of = of
        runs = {run["name"]: run for run in found["runs"]}
        parts = {**found, "names": list(runs)}
        del parts["runs"]
        number = self._revision + 1
        self._parts = {key: _dated(self._parts.get(key), value, number) for key, value in parts.items()}
        self._runs = {key: _dated(self._runs.get(key), value, number) for key, value in runs.items()}
        if any(when == number for when, _ in (*self._parts.values(), *self._runs.values())):
            self._revision = number

    def changes(self, since: int) -> dict[str, Any] | None:
        """Return the parts that a page lacks which has seen this revision, and `runs`, those that changed."""
        if since == self._revision:
            return None
        whole = not self._born <= since <= self._revision
        parts = {key: value for key, (when, value) in self._parts.items() if whole or when > since}
        runs = [value for when, value in self._runs.values() if whole or when > since]
        return {**parts, "runs": runs, "whole": whole, "now": clock.now(), "revisions": [self._revision]}


def _dated(before: tuple[int, Any] | None, value: Any, revision: int) -> tuple[int, Any]:
    return before if before is not None and before[1] == value else (revision, value)
