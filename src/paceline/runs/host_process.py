"""One host of a job that a driver has started there: `paceline host`, by SSH or by an actor of Ray.

The driver speaks by lines of JSON on standard input, so that the token is in no command line and no environment of
another process. The first line says what to run. The first host answers where it listens; the driver tells the others.
When the driver is gone, standard input ends, and the run saves and leaves, as after SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from paceline import environment
from paceline.elastic.membership_messages import TOO_FEW
from paceline.errors import LaunchError, PacelineError, PlanError, WorkersLostError
from paceline.launch.coordinator.meeting_point import own_address
from paceline.launch.engines.host_driver import HELLO
from paceline.launch.engines.sent_function import tell_outcome, unpack
from paceline.runs.run import run
from paceline.units import printable

__all__ = ["run_host"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_host() -> int:
    """Run what the driver says; return the exit status of its `paceline run`."""
    lines = os.fdopen(os.dup(0), "rb", buffering=0)
    os.set_inheritable(lines.fileno(), False)
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.close(silence)
    asked = _read(lines)
    try:
        os.chdir(str(asked["folder"]))
    except OSError as error:
        raise LaunchError(
            f"{asked['folder']} cannot be entered on this host ({error.strerror}): the hosts need the script and its "
            "folder at the same place."
        ) from error
    environment.become_host(
        asked["env"],
        token=str(asked["token"]),
        engine=str(asked["engine"]),
        mark=str(asked["mark"]) if asked.get("tells_rows") else None,
    )
    about: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    if asked["is_first"]:
        listener = _listen(str(asked.get("address") or environment.ssh_address() or own_address()))
        about["head"] = head = _point(listener)
        environment.give_listener(listener.detach())
        _answer(about)
    else:
        _answer(about)
        head = str(_read(lines)["head"])
    threading.Thread(target=_obey, args=(lines,), name="driver", daemon=True).start()
    if "function" in asked:
        return _run_function(asked, head=head)
    from paceline.cli.main import main

    return main([*map(str, asked["words"][:2]), "--head", head, *map(str, asked["words"][2:])])


def _run_function(asked: Mapping[str, Any], *, head: str) -> int:
    """Run a function that the driver has sent, and tell how it ended."""
    sys.path.insert(0, os.getcwd())  # as where it was written
    mark = str(asked["mark"])
    try:
        function, fields = unpack(asked)
        value = run(function, **fields, head=head)
    except (PlanError, LaunchError) as error:
        print(f"paceline: {printable(str(error))}", file=sys.stderr, flush=True)
        tell_outcome(mark, error=error)
        return TOO_FEW if isinstance(error, LaunchError) and error.is_accident else 2
    except WorkersLostError as error:
        tell_outcome(mark, error=error.plain())
        return TOO_FEW
    except PacelineError as error:
        tell_outcome(mark, error=error)
        return 1
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    tell_outcome(mark, value=value)
    return 0


def _read(lines: Any) -> Mapping[str, Any]:
    line = lines.readline()
    if not line:
        raise LaunchError("The driver has ended before it said what to run.", is_accident=True)
    said = json.loads(line)
    if not isinstance(said, dict):
        raise LaunchError("`paceline host` is started by `paceline run --on ssh`, and not by hand.")
    return said


def _answer(about: Mapping[str, Any]) -> None:
    print(f"{HELLO} {json.dumps(about)}", flush=True)


def _listen(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen()
    except OSError as error:
        sock.close()
        raise LaunchError(f"This host cannot listen at {address}: {error.strerror}.") from error
    return sock


def _point(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _obey(lines: Any) -> None:
    """Pass the driver's signals on to this process; its end counts as SIGTERM."""
    try:
        while line := lines.readline():
            signum = json.loads(line).get("signal")
            if signum in SIGNALS:
                os.kill(os.getpid(), signum)
    except (OSError, ValueError, AttributeError) as error:
        print(f"paceline: the driver sent something else: {error}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
