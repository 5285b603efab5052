"""`paceline ui`: serves the pages of a folder of runs until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import webbrowser
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.errors import LaunchError, PlanError
from paceline.monitor.records.run_files import local_path
from paceline.ui.access import Access, is_loopback
from paceline.ui.server import UiServer
from paceline.units import printable

__all__ = ["DEFAULT_PORT", "main_ui"]

DEFAULT_PORT = 7700
BACKLOG = 128
MOST_CONNECTIONS = 256
KEEP_ALIVE_S = 5
END_S = 1  # for answers under way, after Ctrl-C
LOWEST_PRIORITY = 19
TICK_S = 5.0
WHOLE_SECOND = 0  # a tick of uvicorn's at which it sets the date of its answers


def main_ui(
    root: Path, *, host: str, port: int | None, can_control: bool = False, with_token: bool = False, opens: bool = False
) -> int:
    """Serve until Ctrl-C; returns 130 then. `port` None: DEFAULT_PORT, or any free one where that is taken; 0: any.

    Raises LaunchError where it cannot listen, PlanError where `root` is no folder.
    """
    if root.exists() and not root.is_dir():
        raise PlanError(f"{str(root)!r} is not a folder: name the folder of the run directories, or one of these.")
    listener = _listen(host, port)
    try:
        is_local = is_loopback(host)
        bound: int = listener.getsockname()[1]
        access = Access(needs_token=with_token or can_control or not is_local, is_local=is_local, port=bound)
        address = _address(host, bound, access.token)
        print(f"{_title(root)} at {address}", flush=True)
        if not is_local:
            print("the connection is not encrypted: on a network that you do not trust, use an SSH tunnel", flush=True)
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)  # a training on the same cores goes first
        if opens:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # one in a terminal stays
        return asyncio.run(_serve(root, access, listener, can_control=can_control))
    except KeyboardInterrupt:
        return 130
    finally:
        listener.close()


async def _serve(root: Path, access: Access, listener: socket.socket, *, can_control: bool) -> int:
    ui = UiServer(root, access, can_control=can_control)
    config = uvicorn.Config(
        ui.app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        loop="none",
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
    )
    await _Server(config, ui).serve(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """Ends the streams of all pages as soon as it is to end, so that none of them is waited for.

    It wakes every five seconds and at a signal, not ten times a second: each time is taken from a core that trains.
    """

    def __init__(self, config: uvicorn.Config, ui: UiServer) -> None:
        super().__init__(config)
        self._ui, self._loop = ui, asyncio.get_running_loop()

    async def main_loop(self) -> None:
        """Go on until a signal has come."""
        while not await self.on_tick(WHOLE_SECOND):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ui.streams.closing.wait(), TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal, in the main thread."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._ui.streams.close)


def _listen(host: str, port: int | None) -> socket.socket:
    try:
        return _bound(host, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return _listen(host, 0)
        remedy = "Use another --port (0: any free one)" + ("." if is_loopback(host) else ", or --host 127.0.0.1.")
        shown = DEFAULT_PORT if port is None else port
        raise LaunchError(
            f"The page cannot be served on {host}:{shown}: {error.strerror or error}. {remedy}"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _address(host: str, port: int, token: str | None) -> str:
    """What a user opens. An address that stands for all of this machine's is shown as its name."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={token}" if token is not None else "")


def _title(root: Path) -> str:
    what = "" if root.exists() else " (there is no such folder yet)"
    return f"runs in {printable(local_path(root))}{what}"
