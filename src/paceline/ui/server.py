"""The pages and what they ask for: the overview, a run, a comparison, logs; read-only unless control is allowed.

No two readings are done at the same time, and what takes long is read in a thread (`ui/reader.py`). A run is read while
a page shows it, and forgotten some time later.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from paceline.plain_data import read_object
from paceline.ui.access import Access, GuardedApp
from paceline.ui.comparison import MOST_COMPARED, compared
from paceline.ui.control import RunControl
from paceline.ui.event_stream import EventStream, Seen, Streams, Told, json_text, told
from paceline.ui.group_pages import GroupPages
from paceline.ui.log_lines import STREAMS, log_lines, names_in_logs, workers_with_logs
from paceline.ui.reader import Reader
from paceline.ui.report_process import ReportProcess
from paceline.ui.run_view import RunView
from paceline.ui.runs_folder import RunsFolder

__all__ = ["UiServer"]

T = TypeVar("T")
P = ParamSpec("P")

OVERVIEW_EVERY_S = 0.5
RUN_EVERY_S = 0.6
SHARED_S = 0.2  # looks of several pages at the same thing within so long are one
LOOKS_TO_CATCH_UP = 3  # of a page that shows some of the steps so far
MOST_VIEWS = 24  # runs that are kept in memory
GROUPS_EVERY_S = 2.0  # whether a run is in a pool
KEPT_S = 120.0  # after the last page has gone
MOST_BODY = 4096  # bytes of a request's body
MOST_REPLICAS = 1_000_000
POOL_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # a run's name in a pool: no option, and no path
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}


class UiServer:
    """The application over a folder of runs; `streams` are to be closed before the server ends."""

    def __init__(self, root: Path, access: Access, *, can_control: bool) -> None:
        self._root, self._access, self._can_control = root, access, can_control
        self._folder = RunsFolder(root)
        self._folder_looked_s = 0.0
        self._views: dict[str, _ShownRun] = {}
        self._reader = Reader()
        self._reports, self._control = ReportProcess(), RunControl()
        self._report_tasks: dict[str, asyncio.Task[None]] = {}
        self._files = _static_files()
        self.streams = Streams()
        self._groups = GroupPages(self._folder, self.streams, look=self._look, reader=self._reader)
        self.app = GuardedApp(Starlette(routes=self._routes(), lifespan=self._lifespan), access)

    def _routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/api/about", self._about),
            Route("/api/runs", self._runs),
            Route("/api/runs/stream", self._runs_stream),
            Route("/api/run/stream", self._run_stream),
            Route("/api/run/logs", self._logs),
            Route("/api/compare", self._compare),
            Route("/api/run/stop", self._stop, methods=["POST"]),
            Route("/api/run/resize", self._resize, methods=["POST"]),
            Route("/api/pool/cancel", self._cancel, methods=["POST"]),
            *self._groups.routes(),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._reports.close()
            for task in self._report_tasks.values():
                task.cancel()
            await asyncio.gather(*self._report_tasks.values(), return_exceptions=True)
            await self._control.close()
            self._reader.close()
            for watched in self._views.values():
                watched.view.close()

    # ------------------------------------------------------------------------------------------------------- pages

    async def _page(self, _: Request) -> Response:
        return _file("index.html", self._files["index.html"])

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:  # names are looked up, and are no paths
            raise HTTPException(404)
        return _file(name, self._files[name])

    async def _about(self, _: Request) -> Response:
        about = {"root": str(self._root), "can_control": self._can_control}
        return _json(about | ({"control": self._access.control_secret()} if self._can_control else {}))

    # -------------------------------------------------------------------------------------------------------- runs

    async def _runs(self, _: Request) -> Response:
        return _json(await self._reader.read(lambda: self._runs_since(0)) or {})

    async def _runs_stream(self, request: Request) -> Response:
        seen = self.streams.seen(request.headers.get("last-event-id"), 1)
        return EventStream(self.streams, self._changed_runs, seen=seen, every_s=OVERVIEW_EVERY_S)

    async def _changed_runs(self, seen: Seen) -> Told | None:
        return await self._reader.read_often(("runs", seen[0] > 0), lambda: told(self._runs_since(seen[0])))

    def _runs_since(self, seen: int) -> dict[str, Any] | None:
        self._look()
        found = self._folder.changes(seen)
        return None if found is None else found | {"revisions": [found["revision"]]}

    def _look(self) -> None:
        """Have the folder looked at, unless that was just done."""
        if time.monotonic() - self._folder_looked_s >= SHARED_S:
            self._folder.look()
            self._folder_looked_s = time.monotonic()

    async def _run_stream(self, request: Request) -> Response:
        name = request.query_params.get("run", "")
        watched = await self._watched(name)
        seen = self.streams.seen(request.headers.get("last-event-id"), 2)
        if not any(seen):
            watched.view.is_opened()
        return EventStream(self.streams, functools.partial(self._changed_run, name), seen=seen, every_s=RUN_EVERY_S)

    async def _changed_run(self, name: str, seen: Seen) -> Told | None:
        for _ in range(LOOKS_TO_CATCH_UP - 1):
            watched = self._views.get(name)
            if not seen[0] or watched is None or not watched.view.is_catching_up or self.streams.closing.is_set():
                break
            await self._reader.read(watched.look)
        message, to_report = await self._reader.read_often(
            ("run", name, any(seen)), lambda: self._run_since(name, seen)
        )
        if to_report is not None:
            self._report_tasks[name] = asyncio.create_task(self._report(name, to_report))
        return message

    def _run_since(self, name: str, seen: Seen) -> tuple[Told | None, _ShownRun | None]:
        """What a page lacks, and the run where its report is to be read. One reading: each further one takes time of
        cores that train."""
        watched = self._find(name)
        if watched is None:  # it was removed
            return None if seen[0] < 0 else told({"is_gone": True, "revisions": [-1, -1]}), None
        watched.look()
        view = watched.view
        if watched.is_group_due():
            self._group(view)
        is_to_report = not watched.is_reporting and view.is_report_due()
        if is_to_report:
            watched.is_reporting = True
            view.begin_report()
        return told(view.changes((max(0, seen[0]), max(0, seen[1])))), watched if is_to_report else None

    def _group(self, view: RunView) -> None:
        groups = self._folder.groups_of(view.run_dir)
        place = self._folder.place_of(view.run_dir, view.summary)
        view.belongs_to(groups, place, self._folder.decisions_on(view.run_dir))

    async def _report(self, name: str, watched: _ShownRun) -> None:
        try:
            report = await self._reports.read(watched.view.run_dir)
            await self._reader.read(lambda: watched.view.end_report(report))
        finally:
            watched.is_reporting = False
            del self._report_tasks[name]

    async def _logs(self, request: Request) -> Response:
        watched = await self._watched(request.query_params.get("run", ""))
        query = request.query_params
        worker, stream = query.get("worker") or None, query.get("stream") or None
        if (worker is not None and not (worker.isdecimal() and len(worker) < 7)) or stream not in (None, *STREAMS):
            raise HTTPException(400, "worker is a number, and stream is stdout or stderr")
        view = watched.view

        def read() -> dict[str, Any]:
            watched.look()
            attempt = view.summary.attempt if view.summary is not None else 0
            number = None if worker is None else int(worker)
            lines = log_lines(view.run_dir, attempt, worker=number, stream=stream, find=query.get("find", "")[:200])
            workers = workers_with_logs(view.run_dir, attempt)
            names = names_in_logs(view.run_dir, workers)
            return {"workers": workers, "names": names, "attempt": attempt, "lines": lines}

        return _json(await self._reader.read(read))

    async def _compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(names) <= MOST_COMPARED:
            raise HTTPException(400, f"name 1 to {MOST_COMPARED} runs")
        found: list[dict[str, Any]] = []
        for name in names:
            watched = await self._watched(name)
            view = watched.view
            parts = await self._reader.read(
                watched.look, lambda view=view: self._group(view), lambda view=view: view.changes((0, 0)) or {}
            )
            found.append(parts | {"name": name})
        runs = [
            {
                "name": run["name"],
                "summary": run.get("summary", {}) | {"place": run["place"]},
                "evaluations": run.get("evaluations", {}),
            }
            | {"curves": run.get("curves", {"series": {}, "is_exact": False})}
            for run in found
        ]
        return _json({"runs": runs, "facts": compared(found)})

    # ----------------------------------------------------------------------------------------------------- control

    async def _stop(self, request: Request) -> Response:
        run_dir, _ = await self._asked(request)
        return _json(await self._control.ask(run_dir, "stop"))

    async def _resize(self, request: Request) -> Response:
        run_dir, body = await self._asked(request)
        replicas = body.get("replicas")
        if type(replicas) is not int or not 1 <= replicas <= MOST_REPLICAS:
            raise HTTPException(400, "replicas is a number from 1 on")
        return _json(await self._control.ask(run_dir, "resize", str(replicas)))

    async def _cancel(self, request: Request) -> Response:
        body = await self._asked_body(request)
        pool = await self._reader.read(self._look, lambda: self._folder.pool_dir(str(body.get("pool", ""))))
        name = str(body.get("name", ""))
        if pool is None or not POOL_RUN.fullmatch(name):
            raise HTTPException(404, "there is no such run in this pool")
        return _json(await self._control.ask(pool, "pool", "--cancel", name))

    async def _asked(self, request: Request) -> tuple[Path, dict[str, Any]]:
        """The run of a request that changes one, and its body; HTTPException where it may not, or is none."""
        asked = await self._asked_body(request)
        return (await self._watched(str(asked.get("run", "")))).view.run_dir, asked

    async def _asked_body(self, request: Request) -> dict[str, Any]:
        """The body of a request that changes something; HTTPException where it may not."""
        if not self._can_control:
            raise HTTPException(403, "runs are only shown here: start paceline ui with --control")
        if not self._access.may_control(request.headers):
            raise HTTPException(403, "this request does not come from the page")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                raise HTTPException(413)
        try:
            return read_object(body)
        except ValueError as error:
            raise HTTPException(400, f"the body {error}") from error

    # ------------------------------------------------------------------------------------------------------ reading

    async def _watched(self, name: str) -> _ShownRun:
        """The view of a run of the folder; HTTPException 404 where there is none of that name."""
        watched = await self._reader.read(lambda: self._find(name))
        if watched is None:
            raise HTTPException(404, "there is no such run")
        return watched

    def _find(self, name: str) -> _ShownRun | None:
        """The same, as a reading; None where there is none."""
        path = self._folder.find(name)
        if path is None:
            return None
        watched = self._views.get(name)
        if watched is None:
            self._forget()
            watched = self._views[name] = _ShownRun(RunView(path, name))
        watched.used_s = time.monotonic()
        return watched

    def _forget(self) -> None:
        """Drop runs that no page shows: old ones, and the oldest where there are too many."""
        by_age = sorted(self._views, key=lambda name: self._views[name].used_s)
        old = [name for name in by_age if time.monotonic() - self._views[name].used_s > KEPT_S]
        for name in {*old, *by_age[: max(0, len(by_age) - MOST_VIEWS + 1)]}:
            if not self._views[name].is_reporting:
                self._views.pop(name).view.close()


@dataclasses.dataclass(slots=True)
class _ShownRun:
    """A run that pages show."""

    view: RunView
    used_s: float = 0.0
    is_reporting: bool = False  # its report is being read
    _looked_s: float = 0.0
    _grouped_s: float = -GROUPS_EVERY_S

    def is_group_due(self) -> bool:
        """Whether it is time to see which pools and sweeps the run belongs to; notes that it is done."""
        now = time.monotonic()
        if now - self._grouped_s < GROUPS_EVERY_S:
            return False
        self._grouped_s = now
        return True

    def look(self) -> None:
        if self.view.is_catching_up or time.monotonic() - self._looked_s >= SHARED_S:
            self.view.look()
            self._looked_s = time.monotonic()


def _static_files() -> dict[str, bytes]:
    folder = resources.files("paceline.ui") / "static"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def _file(name: str, content: bytes) -> Response:
    kind = KINDS.get(name.rpartition(".")[2], "application/octet-stream")
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


def _json(found: Any) -> Response:
    return PlainTextResponse(json_text(found), media_type="application/json")
