"""What an actor of Ray does on a host: it starts `paceline host`, and passes lines between it and the driver.

When the actor's own process ends, as with its node, the host's standard input ends: it saves, leaves, and goes.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

__all__ = ["HostProcess"]

ANSWER_S = 0.25  # so long an answer waits for a line
MOST_LINES = 1000
END_S = 2.0
COMMAND_S = 50.0


class HostProcess:
    """One host's process. Its methods may be called at the same time."""

    def __init__(self, python: str | None) -> None:
        self._lines = queue.SimpleQueue[str]()
        words = [python or sys.executable, "-m", "paceline", "host"]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, line: str) -> None:
        """Write a line to its standard input."""
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.write((line + "\n").encode())
                pipe.flush()

    def poll(self) -> tuple[list[str], int | None]:
        """Return the lines that are new, after a moment if there are none, and the exit status once all were given."""
        found, deadline = list[str](), time.monotonic() + ANSWER_S
        while len(found) < MOST_LINES:
            try:
                found.append(self._lines.get(timeout=0 if found else max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        is_over = not found and not self._reader.is_alive() and self._lines.empty()
        code = self._process.wait() if is_over else None
        return found, code if code is None or code >= 0 else 128 - code

    def run(self, words: Sequence[str], folder: str) -> tuple[int, bytes, str]:
        """Run another command beside it."""
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S)
        return done.returncode, done.stdout, done.stderr.decode(errors="replace")

    def end(self) -> None:
        """End it: first by the end of its input, which has the run save and leave."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        pipe = self._process.stdout
        if pipe is not None:
            for line in pipe:
                self._lines.put(line.decode(errors="replace").rstrip("\r\n"))
