"""`paceline ui` as a process of its own, as a user starts it, and streams of it read by a plain connection."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["ServedPage", "messages", "serve"]

START_S = 30.0
END_S = 20.0


class ServedPage:
    """A server and the address that it printed."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def interrupt(self) -> float:
        """Send Ctrl-C, and return how many seconds the process took to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(END_S)
        return time.monotonic() - began


@contextlib.contextmanager
def serve(folder: Path, *words: str) -> Iterator[ServedPage]:
    """Serve a folder's runs on any free port until the end of the block."""
    command = [sys.executable, "-m", "paceline", "ui", str(folder), "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if "http://" not in line:
                raise RuntimeError(f"paceline ui did not start: {line!r}")
            yield ServedPage(process, line.split()[-1])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            finally:
                process.kill()


def messages(address: str, path: str, *, limit_s: float) -> Generator[dict[str, Any], None, None]:
    """Yield what a stream sends until nothing comes for `limit_s`."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=limit_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()
