"""What a program measures of itself: the time of each step, or the most memory that it has held since a moment.

Memory is what of the process is resident, without what was there before the model (Python, torch). With PEAK_SINCE_STEP
in the environment the kernel's high-water mark is set back after that many steps, once every buffer exists, so what
came and went while the model was made does not count. Such a run is not timed: for it the kernel visits every page, and
the steps that follow pay for what that does to them.
"""

import json
import os
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
        self._began = time.perf_counter()

    def step(self) -> None:
        now = time.perf_counter()
        self.took_ms.append(1000 * (now - self._began))
        if len(self.took_ms) == self._settled_after:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self._began = time.perf_counter()

    def write(self, out: str, worker_rank: int) -> None:
        """Write OUT.RANK."""
        found = {"took_ms": self.took_ms, "peak": resident_bytes("VmHWM") - self.base, "pid": os.getpid()}
        Path(f"{out}.{worker_rank}").write_text(json.dumps(found))
