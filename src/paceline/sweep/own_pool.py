"""A pool of the sweep's own, for as long as the sweep runs: a process that ends with it, also by `kill -9`.

The kernel then sends the pool SIGTERM: its runs save and end, and go on when the sweep is started again.

Each wait here has a limit, and looks at whether the sweep was asked to end: once, and nothing more is started; twice,
and nothing more is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline import environment
from paceline.errors import LaunchError
from paceline.launch.fork.process_lifetime import set_parent_death_signal
from paceline.logs.log_reader import last_lines
from paceline.pool.pool_state import PoolRecord
from paceline.private_files import make_run_directory

__all__ = ["OwnPool"]

START_S = 60.0  # until its process has taken the folder
FORMER_S = 150.0  # until the pool of a sweep that was killed has had its runs save, and ended
END_S = 150.0  # a pool takes a minute at most for its runs, and one for the parts on its host
LOOK_S = 0.1
MOST_STARTS = 5  # of a pool that ends by itself


class OwnPool:
    """The process that serves `folder`. `slots`: devices; None: as many as `paceline pool` takes by itself.

    `num_asked()`: how often the sweep was asked to end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int | None,
        say: Callable[[str], None],
        num_asked: Callable[[], int],
    ) -> None:
        self._folder, self._slots, self._say, self._num_asked = folder, slots, say, num_asked
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._folder / "pool.log"

    def start(self) -> None:
        """Start it, and wait until it serves, or until the sweep is asked to end; raises LaunchError where it does not
        serve.
        """
        make_run_directory(self._folder)
        self._await_former()
        if self._num_asked():
            return
        words = ["pool", str(self._folder), *([] if self._slots is None else ["--slots", str(self._slots)])]
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words],
                env={**environment.child_environment(), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the sweep
                preexec_fn=functools.partial(set_parent_death_signal, signal.SIGTERM),
            )
        deadline = time.monotonic() + START_S
        while PoolRecord.load(self._folder).pid != self._process.pid and not self._num_asked():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise LaunchError(f"The sweep's pool has not started: {self._last_line()} (its output: {self.log})")
            time.sleep(LOOK_S)

    def keep(self) -> None:
        """Start it again where it was killed; its runs have gone on meanwhile. Raises LaunchError at the fifth time."""
        if self._process is None or self._process.poll() is None:
            return
        self._num_starts += 1
        if self._num_starts >= MOST_STARTS:
            raise LaunchError(
                f"The sweep's pool has ended {MOST_STARTS} times: {self._last_line()} (its output: {self.log})"
            )
        self._say("the sweep's pool has ended: it is started again, and finds its runs")
        self.start()

    def end(self) -> None:
        """Have its runs save and end, and wait for that, for two and a half minutes at most."""
        if self._process is None:
            return
        self._process.terminate()
        deadline = time.monotonic() + END_S
        while self._process.poll() is None:
            if self._num_asked() > 1:
                self._say(f"asked again: the sweep ends now, and its pool (process {self._process.pid}) by itself")
                break
            if time.monotonic() > deadline:
                self._say(f"the sweep's pool (process {self._process.pid}) has not ended in {END_S:.0f} s")
                break
            time.sleep(LOOK_S)
        self._process = None

    def _await_former(self) -> None:
        deadline, is_told = time.monotonic() + FORMER_S, False
        while (record := PoolRecord.load(self._folder)).is_alive(self._folder) and not self._num_asked():
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"The pool of an earlier start (process {record.pid}) has not ended in {FORMER_S:.0f} s. End it, "
                    "and start the sweep again."
                )
            if not is_told:
                self._say("waits until the runs of the earlier start have saved and ended")
                is_told = True
            time.sleep(LOOK_S)

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            return next(iter(last_lines(self.log)), "it has printed nothing")
        return "it has printed nothing"
