"""error.json: the error of a worker that fails, from which the launcher explains the failure to the user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline import clock
from paceline.comm.messages.json_channel import ChannelClosed
from paceline.errors import PacelineError, PlanError, SyncError
from paceline.plan.job import ERROR_SPARE, Assignment

__all__ = ["is_peer_failure", "release_error_space", "reserve_error_space", "write_error"]

PEER_LOST = re.compile(
    r"lost contact with a peer|[Cc]onnection closed by peer|Connection reset by peer|Broken pipe|Connection refused"
)
TORCH_ERROR = re.compile(
    r"gloo|NCCL|nccl|ProcessGroup|c10d|TCPStore|DistBackendError"
)  # in a plain RuntimeError of torch.distributed
LONG, TALL = 4000, 60  # characters and lines of one message that are kept; stderr.log has all of it
SPARE_BYTES = 8192  # of a file that is overwritten when the disk is full
SPARE_LONG = (3000, 1000, 300, 100)  # characters that are tried there; one may take six bytes


def write_error(error: BaseException, assignment: Assignment, *, step: int) -> None:
    """Write error.json, once: the first error of a worker counts. Prints on stderr when it cannot."""
    path = Path(assignment.worker_dir) / "error.json"
    if path.exists():
        return
    fields = {
        "kind": type(error).__name__,
        "message": _short(_message(error)),
        "traceback": "".join(map(_short, traceback.format_exception(error, chain=not _is_lost_loader(error)))),
        "worker": assignment.rank,
        "host": assignment.host,
        "pid": os.getpid(),
        "step": step,
        "time": clock.now(),
        "usage": isinstance(error, PlanError),
        "echo": is_peer_failure(error),
        "log": str(log if (log := path.with_name("stderr.log")).exists() else path),
        "says_all": isinstance(error, PacelineError) and not isinstance(error, SyncError),
    }
    temporary = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(fields), encoding="utf-8")
        temporary.rename(path)
    except OSError as problem:
        _write_over_spare(path, fields, problem)
    finally:
        with contextlib.suppress(OSError):  # the disk fails, which has been reported
            temporary.unlink(missing_ok=True)
    release_error_space(path.parent)


def reserve_error_space(worker_dir: Path) -> None:
    """Reserve the disk space that error.json may need: it may have to report a full disk."""
    (worker_dir / ERROR_SPARE).write_bytes(b" " * SPARE_BYTES)


def release_error_space(worker_dir: Path) -> None:
    """Free the reserved space."""
    with contextlib.suppress(OSError):  # a hidden file of a few blocks is left
        (worker_dir / ERROR_SPARE).unlink(missing_ok=True)


def _write_over_spare(path: Path, fields: dict[str, Any], problem: OSError) -> None:
    """Write the error into blocks that the spare file has already: of a long one, the beginning and the end."""
    for long in SPARE_LONG:
        texts = {name: _short(fields[name], long) for name in ("message", "traceback")}
        if _fits_spare(path, json.dumps({**fields, **texts}).encode()):
            return
    with contextlib.suppress(OSError):  # the error itself goes on to stderr.log, where that can be written
        print(f"paceline: {path} could not be written: {problem}", file=sys.stderr)


def _fits_spare(path: Path, text: bytes) -> bool:
    """Make the spare file `path`, with this text; False where it is too long, or a limit of files' sizes is passed."""
    spare = path.parent / ERROR_SPARE
    if len(text) > SPARE_BYTES:
        return False
    try:
        with open(spare, "r+b") as file:
            file.write(text)
            file.truncate()
        spare.rename(path)
    except OSError:
        return False
    return True


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error is only that a peer was lost: the peer's own error is the one to show."""
    message = _message(error)
    is_ours = isinstance(error, (SyncError, ChannelClosed, dist.DistError)) or (
        type(error) is RuntimeError and TORCH_ERROR.search(message) is not None
    )  # and not from a connection that the user's code opened
    return is_ours and PEER_LOST.search(message) is not None


def _is_lost_loader(error: BaseException) -> bool:
    """Whether torch tells that a loader process has ended. Its signal handler does, wherever this process is; what it
    was handling, the broken pipe of that loader at most, explains nothing."""
    return type(error) is RuntimeError and _message(error).startswith("DataLoader worker (pid")


def _message(error: BaseException) -> str:
    """`str(error)`, also where the user's own `__str__` fails."""
    try:
        return str(error)
    except Exception as failure:  # an error of the user's code; the one being reported matters more
        return f"(its __str__ failed: {type(failure).__name__})"


def _short(text: str, long: int = LONG) -> str:
    """The text; a long one without its middle."""
    lines = text.splitlines(keepends=True)
    if len(lines) > TALL:
        half = TALL // 2
        text = f"{''.join(lines[:half])}... ({len(lines) - 2 * half:,} lines left out)\n{''.join(lines[-half:])}"
    if len(text) > long:
        half = long // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
    return text
