"""A `RunLogger` whose tracker lives in a process of its own, so that nothing in its package can hold up the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import environment
from paceline.monitor.export.run_logger import LoggedRun, ScalarPoint
from paceline.monitor.export.tracker_process import point_to
from paceline.monitor.export.tracker_state import LOGGERS_DIR
from paceline.plain_data import read_object

__all__ = ["ProcessLogger", "TrackerFailed"]

MODULE = "paceline.monitor.export.tracker_process"
START_S, CALL_S = 120.0, 60.0  # for the package's import and the tracker's first answer; for each call
ANSWER_BYTES = 1 << 16


class TrackerFailed(Exception):
    """The tracker's process has reported an error, has ended, or did not answer in time."""


class ProcessLogger:
    """Passes each call to the process of the tracker `name`, and waits for its answer at most a minute."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = b""

    def start(self, run: LoggedRun) -> int | None:
        directory = Path(run.run_dir) / LOGGERS_DIR
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{self.name}.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment.child_environment(),
                start_new_session=True,  # Ctrl-C is the run's
            )
        last_step = self._call(START_S, call="start", run=dataclasses.asdict(run)).get("last_step")
        return None if last_step is None else int(last_step)

    def log(self, points: Sequence[ScalarPoint]) -> None:
        self._call(CALL_S, call="log", points=[point_to(point) for point in points])

    def end(self, state: str) -> None:
        self._call(CALL_S, call="end", state=state)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CALL_S)
        self.abandon()

    def abandon(self) -> None:
        """End the process at once, whatever it is at."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _call(self, limit_s: float, **call: Any) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise TrackerFailed("its process has ended")
        try:
            process.stdin.write(json.dumps(call).encode() + b"\n")
            process.stdin.flush()
            answer = read_object(self._line(process, limit_s))
        except (OSError, ValueError) as error:  # ValueError: the pipe was closed by `abandon`, or no answer is whole
            raise TrackerFailed(f"its process has ended ({error})") from error
        if "error" in answer:
            raise TrackerFailed(str(answer["error"]))
        return answer

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes:
        pipe = process.stdout
        if pipe is None:
            raise TrackerFailed("its process has no output")
        until = time.monotonic() + limit_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TrackerFailed(f"no answer for {limit_s:.0f} s")
            more = os.read(pipe.fileno(), ANSWER_BYTES)
            if not more:
                raise TrackerFailed("its process has ended")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line
