"""Starts the process that takes over as the coordinator, on a host whose workers go on beside it.

It is a process of its own (`paceline.runs.new_head`), without workers: for it this host is one of the others. It ends
with this supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from paceline import config
from paceline.launch.coordinator.head_register import HeadRecord
from paceline.plan.job import Assignment, Job, assignment_to_json

__all__ = ["NewHead"]

MODULE = "paceline.runs.new_head"
END_S = 30.0  # after this host's own end: it still writes the run's record


class NewHead:
    """The coordinator's process on this host, if there is one."""

    def __init__(self) -> None:
        self.hush: Callable[[], None] = lambda: None  # called when it begins: it shows the whole run on this console
        self._process: subprocess.Popen[bytes] | None = None
        self._is_waiting = False  # it is ready, and has not been told to take over

    @property
    def is_at_work(self) -> bool:
        return self._is_alive and not self._is_waiting

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def prepare(self) -> None:
        """Have a process ready, as this host may be about to take over: it takes half a second to start."""
        if not self._is_alive:
            command = [sys.executable, "-P", "-m", MODULE]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            self._is_waiting = True

    def start(self, before: HeadRecord, *, template: Assignment, asked: Job, say: Callable[[str], None]) -> None:
        """Take over from the coordinator of this record; does nothing while a process does that already.

        `template`: the assignment of this host's workers; `asked`: the job as the user started it.
        """
        if self.is_at_work:
            return
        say(f"this host takes over from the coordinator on host {before.host}")
        self.hush()
        words = {
            "assignment": assignment_to_json(template),
            "asked": config.to_table(asked),
            "before": before.to_json(),
            "parent": os.getpid(),
        }
        self.prepare()
        self._tell(json.dumps(words).encode())

    def _tell(self, words: bytes) -> None:
        """The process reads this to its end; with nothing to do it ends."""
        self._is_waiting = False
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it ended at once: the next turn tries again
                self._process.stdin.write(words)
                self._process.stdin.close()

    def leave(self) -> None:
        """This host was asked to leave: the coordinator's process on it hands over to another host."""
        if self._process is not None and self.is_at_work:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Wait for the process's end, for a limited time; the run has ended on this host."""
        process = self._process
        if process is None:
            return
        if self._is_waiting:
            self._tell(b"")
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
