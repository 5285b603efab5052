"""What a program measures of itself: the time of each step, or the most memory that it has held since a moment.

Memory is what of the process is resident, without what was there before the model (Python, torch). With PEAK_SINCE_STEP
in the environment the kernel's high-water mark is set back after that many steps, once every buffer exists, so what
came and went while the model was made does not count. Such a run is not timed: for it the kernel goes through every
page, and the steps that follow pay for what that does to them.

With INTERLEAVE_SOCKET, a socket, and INTERLEAVE_BLOCK in the environment the program stands still after every so many
steps, until it is its turn again (`driving/interleaved.py`).
"""

import json
import os
import socket
import time
from pathlib import Path


def resident_bytes(field: str = "VmRSS") -> int:
    """A line of /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Measured:
    """Made before the model; `step()` is called after each step."""

    def __init__(self) -> None:
        self.base, self._settled_after = resident_bytes(), int(os.environ.get("PEAK_SINCE_STEP", "0"))
        self.took_ms: list[float] = []
        self._interleaved = _Interleaved() if "INTERLEAVE_SOCKET" in os.environ else None
        self._began = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self.took_ms.append(1000 * (now - self._began))
        if len(self.took_ms) == self._settled_after:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        if self._interleaved is not None:
            self._interleaved.pause_at_end(len(self.took_ms))
        self._began = time.perf_counter()

    def write(self, out: str, worker_rank: int) -> None:
        """Write OUT.RANK."""
        found = {"took_ms": self.took_ms, "peak": resident_bytes("VmHWM") - self.base, "pid": os.getpid()}
        Path(f"{out}.{worker_rank}").write_text(json.dumps(found))


class _Interleaved:
    """Waits at the end of each block until the measurement lets this program go on."""

    def __init__(self) -> None:
        self._block = int(os.environ["INTERLEAVE_BLOCK"])
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(os.environ["INTERLEAVE_SOCKET"])

    def pause_at_end(self, steps: int) -> None:
        """After the last step of a turn: wait for the next one."""
        if steps % self._block == 0:
            self._sock.sendall(b".")
            if not self._sock.recv(1):
                raise SystemExit("the measurement is over")
