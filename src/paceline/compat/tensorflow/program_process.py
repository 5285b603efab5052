"""The process of a task's program: started in a Python of its own, asked to end, and ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.comm.flight_recorder import STACK_SIGNAL, STACKS_NAME
from paceline.plain_data import read_object
from paceline.regular_files import read_regular

__all__ = ["ProgramProcess"]

CHILD = Path(__file__).with_name("child.py")
REPORT = "program_error.json"
MOST_BYTES = 8 << 20  # of a report that is read
EXIT_S = 5.0  # a program that has reported an error has so long to exit: TensorFlow may wait for lost peers there


class ProgramProcess:
    """One start of a program. `report` is what it says of its own error, None while there is none."""

    def __init__(
        self,
        script: str,
        args: Sequence[str],
        *,
        worker_dir: Path,
        environment: Mapping[str, str],
        parent: int,
        notices: Sequence[int] = (),
    ) -> None:
        """Start it; it ignores the signals `notices`, and writes into this process's standard output and error. Raises
        OSError where that fails.
        """
        self._report_path = worker_dir / REPORT
        self._report_path.unlink(missing_ok=True)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
        told = ",".join(map(str, notices)) or "-"
        stacks = [str(worker_dir / STACKS_NAME), str(int(STACK_SIGNAL))]
        words = [sys.executable, *flags, str(CHILD), str(self._report_path), str(parent), told, *stacks, script, *args]
        self._process = subprocess.Popen(words, env=dict(environment), stdin=subprocess.DEVNULL)
        self._began_s = time.monotonic()
        self._end_by: float | None = None  # then it is killed

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lasted_s(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._began_s

    @property
    def report(self) -> dict[str, Any] | None:
        """What it has reported of its error; None: nothing, or not wholly."""
        try:
            return read_object(read_regular(self._report_path, MOST_BYTES))
        except (OSError, ValueError):
            return None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal that ended it; None while it runs. One that was told to end, or
        has reported an error, is killed when its time is over."""
        code = self._process.poll()
        if code is not None:
            return code
        now = time.monotonic()
        if self._end_by is None and self._report_path.exists():
            self._end_by = now + EXIT_S
        if self._end_by is not None and now >= self._end_by:
            self._signal(signal.SIGKILL)
        return None

    def ask_to_end(self, limit_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after `limit_s` seconds; a stopped process is continued. Safe to repeat."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        by = time.monotonic() + limit_s
        self._end_by = by if self._end_by is None else min(by, self._end_by)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)
