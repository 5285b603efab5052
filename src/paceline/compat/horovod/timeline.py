"""The timeline: what each operation waited for and how long it took, as a trace for chrome://tracing or Perfetto.

Worker 0 writes it. Each operation is a row: from its submission to the verdict it is negotiated (NEGOTIATE_ALLREDUCE),
then it runs (ALLREDUCE).
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from paceline import clock
from paceline.compat.horovod.requests import OpRequest, OpVerdict
from paceline.errors import writing

__all__ = ["Timeline"]


class Timeline:
    """Writes one file at a time, between `start` and `stop`. Any thread may use it."""

    def __init__(self, *, is_written: bool) -> None:
        self._is_written, self._lock = is_written, threading.Lock()
        self._file: TextIO | None = None
        self._rows: dict[str, int] = {}
        self._marks_cycles, self._began_s = False, 0.0

    def start(self, path: str, *, marks_cycles: bool) -> None:
        """Begin a file; one that is being written is finished. Raises OSError where it cannot be written."""
        self.stop()
        if not self._is_written:
            return
        with self._lock, writing(Path(path)):
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed by stop()
            self._rows, self._marks_cycles, self._began_s = {}, marks_cycles, time.perf_counter()
            self._file.write("[")
            self._put(
                "M",
                "start_time",
                0,
                0.0,
                args={"start_time_since_epoch_in_micros": int(clock.now() * 1e6)},
                is_first=True,
            )

    def stop(self) -> None:
        """Finish the file, if one is being written."""
        with self._lock:
            if self._file is not None:
                self._file.write("]\n")
                self._file.close()
                self._file = None

    @property
    def is_open(self) -> bool:
        """Whether a file is being written, as seen without the lock."""
        return self._file is not None

    def began(self, request: OpRequest) -> None:
        """This worker has submitted an operation."""
        if not self.is_open:
            return
        self._mark("B", request.name, f"NEGOTIATE_{request.kind.upper()}")

    def decided(self, verdict: OpVerdict) -> None:
        """The verdict on operations has come."""
        if not self.is_open:
            return
        if self._marks_cycles:
            self._mark("i", "cycles", "CYCLE_START")
        for name in verdict.names:
            self._mark("E", name, f"NEGOTIATE_{verdict.kind.upper()}")

    def ran(self, verdict: OpVerdict, began_s: float, ended_s: float) -> None:
        """Operations have run between these moments of `time.perf_counter()`."""
        if not self.is_open:
            return
        for name in verdict.names:
            with self._lock:
                if self._file is not None:
                    row, length = self._row(name), 1e6 * (ended_s - began_s)
                    self._put("X", verdict.kind.upper(), row, began_s, dur=round(length, 1))

    def _mark(self, phase: str, row: str, what: str) -> None:
        with self._lock:
            if self._file is not None:
                self._put(phase, what, self._row(row), time.perf_counter())

    def _row(self, name: str) -> int:
        """The number of a row; a new one is given its name in the file."""
        if name not in self._rows:
            self._rows[name] = len(self._rows) + 1
            self._put("M", "process_name", self._rows[name], 0.0, args={"name": name})
        return self._rows[name]

    def _put(self, phase: str, what: str, row: int, at_s: float, *, is_first: bool = False, **more: Any) -> None:
        if self._file is None:
            return
        event = {"ph": phase, "name": what, "pid": row, "tid": 0, **more}
        if phase != "M":
            event["ts"] = round(1e6 * (at_s - self._began_s), 1)
        self._file.write(("" if is_first else ",\n") + json.dumps(event))
