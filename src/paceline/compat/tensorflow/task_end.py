"""What the end of a task's program means for the run: pure functions of its exit status and of what it reported."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline import clock

__all__ = ["PEER_LOST", "TaskIdentity", "error_fields", "is_aborted_by_peer", "is_peer_loss", "loss_fields"]

TAIL_BYTES = 8192  # of standard error, in which an abort is explained
LONG, TALL = 4000, 60  # characters and lines of a message or a traceback that are kept; stderr.log has all of it
# Errors of TensorFlow that may come of another task's end.
PEER_ERRORS = frozenset(
    {"UnavailableError", "AbortedError", "CancelledError", "InternalError", "DeadlineExceededError", "UnknownError"}
)
PEER_LOST = re.compile(
    r"Connection reset|Socket closed|[Cc]onnection refused|failed to connect to all addresses|"
    r"Collective ops is aborted|heartbeat|[Uu]nhealthy|coordination service|CoordinationService|"
    r"is no longer connected|connection dropped|Broken pipe|GOAWAY|peer.{0,40}(?:failed|down|lost)",
    re.IGNORECASE,
)


def is_peer_loss(report: Mapping[str, Any]) -> bool:
    """Whether an error of a program only says that another task has gone: then that task's own end is the one to show.

    It has to be TensorFlow's own error, and its text one of those for lost connections.
    """
    is_tensorflows = str(report.get("module", "")).split(".")[0] == "tensorflow"
    is_kind = str(report.get("kind", "")) in PEER_ERRORS
    return is_tensorflows and is_kind and PEER_LOST.search(str(report.get("message", ""))) is not None


def is_aborted_by_peer(signum: int, log: Path) -> bool:
    """Whether TensorFlow has aborted a program because another task had gone, by the end of its standard error."""
    if signum != signal.SIGABRT:
        return False
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return PEER_LOST.search(file.read().decode(errors="replace")) is not None
    except OSError:
        return False


def error_fields(report: Mapping[str, Any] | None, *, code: int, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of error.json for a program that ended with an exit code; `common`: who and where."""
    if report is None:
        message = f"the program ended with exit code {code}, and without an error of Python's"
        return {**common, "kind": "SystemExit", "message": message, "traceback": "", "echo": False, "says_all": True}
    return {
        **common,
        "kind": str(report.get("kind", "error")),
        "message": _short(str(report.get("message", ""))),
        "traceback": _short(str(report.get("traceback", ""))),
        "echo": is_peer_loss(report),
        "says_all": False,
    }


def loss_fields(name: str, *, signum: int, pid: int, is_echo: bool, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of error.json for a program that a signal ended."""
    cause = f"{name} (pid {pid}) killed by signal {signum}"
    return {
        **common,
        "kind": "Killed",
        "message": f"{name} (host {common['host']}, pid {pid}) was killed by signal {signum} ({_name_of(signum)})",
        "traceback": "",
        "cause": cause,
        "echo": is_echo,
        "says_all": True,
        "names_workers": True,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskIdentity:
    """Who writes an error.json."""

    rank: int
    host: str
    log: str

    def fields(self, pid: int) -> dict[str, Any]:
        """What every error.json says. The time is that of the call: make it when the end is seen."""
        return {
            "worker": self.rank,
            "host": self.host,
            "pid": pid,
            "step": None,
            "time": clock.now(),
            "usage": False,
            "is_program": True,
            "log": self.log,
        }


def _short(text: str) -> str:
    """The text; a long one without its middle."""
    lines = text.splitlines(keepends=True)
    if len(lines) > TALL:
        half = TALL // 2
        text = f"{''.join(lines[:half])}... ({len(lines) - 2 * half:,} lines left out)\n{''.join(lines[-half:])}"
    if len(text) > LONG:
        half = LONG // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
    return text


def _name_of(signum: int) -> str:
    return signal.Signals(signum).name if signum in set(signal.Signals) else f"SIG{signum}"
