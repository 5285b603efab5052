"""How processes of this host end, as any other process sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.processes import how_ended, process_state

NAME = "sleep"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("signum", "expected"),
    [(signal.SIGKILL, "killed by signal 9"), (signal.SIGTERM, "killed by signal 15"), (None, "ended with status 3")],
)
def test_any_process_sees_how_another_ended_until_it_is_reaped(signum: int | None, expected: str) -> None:
    command = ["sleep", "60"] if signum else ["sh", "-c", "exit 3"]
    name = NAME if signum else "sh"
    with subprocess.Popen(command) as process:
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != name:
            time.sleep(0.005)  # it has not yet replaced this program's copy
        if signum:
            assert how_ended(process.pid, name) == ""
            os.kill(process.pid, signum)
        while process_state(process.pid) != "gone":
            time.sleep(0.005)
        asked = f"from paceline.processes import how_ended; print(how_ended({process.pid}, {name!r}))"
        other = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        assert other.stdout.strip() == expected
        assert how_ended(process.pid, "another") == ""  # a number that the system has given again
        process.wait()
        assert how_ended(process.pid, name) == ""
