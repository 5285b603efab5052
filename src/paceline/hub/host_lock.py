"""One process of a host makes what all need, and the others wait for it as long as it gets on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import CheckpointError

__all__ = ["alone"]

STILL_S = 600.0  # a process of whose work nothing has come for so long is not waited for
LOOK_S = 0.2


@contextlib.contextmanager
def alone(folder: Path, still_s: float = STILL_S) -> Iterator[None]:
    """Hold the lock of a folder that is filled under the name `.partial`, until the block or this process ends.

    Raises CheckpointError where another process has it and nothing comes there any more.
    """
    partial = folder.with_suffix(".partial")
    file = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        seen, since = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = _blocks(partial)
                if now != seen:
                    seen, since = now, time.monotonic()
                if time.monotonic() - since > still_s:
                    raise CheckpointError(
                        f"another process fills {partial}, and nothing has come there for {still_s:g} s: end it, or "
                        "name another cache_dir"
                    ) from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(file)


def _blocks(folder: Path) -> int:
    """How much there is on the disk."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found += path.stat().st_blocks
    return found
