"""Parameter servers that are killed at a chosen message."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.sync.parameter_server.mirrored_server import MirroredServer
from paceline.sync.parameter_server.server import Server

__all__ = ["MIRROR", "SERVER", "arm"]

SERVER, MIRROR = "server", "mirror"


def arm(folder: Path, deaths: dict[int, tuple[str, str, str]]) -> None:
    """Have a server's process exit at the points, by step, each once: in whichever process comes there first."""

    def strike(server: Any, method: str, moment: str, step: int) -> None:
        is_copy = (server._is_copy or method == "_copy") and not server._has_taken_over
        role = SERVER if server._mirror is not None else MIRROR if is_copy else ""
        if deaths.get(step) != (role, method, moment):
            return
        try:
            (folder / f"exited_{step}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(server: Any, *args: Any, **more: Any) -> Any:
            strike(server, method, "before", step_of(server, args))
            result = function(server, *args, **more)
            strike(server, method, "after", step_of(server, args))
            return result

        return call

    for method in {method for _, method, _ in deaths.values()}:
        setattr(MirroredServer, method, watched(method, getattr(MirroredServer, method)))


def step_of(server: Server, args: tuple[Any, ...]) -> int:
    """The step that a method is about."""
    for one in args:
        if isinstance(one, dict) and "walk" in one:
            return one["walk"][1]
        if isinstance(one, tuple) and len(one) == 3:
            return one[1]
        if isinstance(one, TensorMessage):
            return one.header["stepped"][1] + 1
    return server._last_step[1]
