"""Preemption without a supervisor: SIGTERM, Ctrl-C or a batch system's warning reaches the worker itself.

Under torchrun, srun or mpirun one worker may get the signal, or all of them, at different moments. A worker that gets
it only notes it. The present step goes on, its metadata carries the request to the other workers, and all save and
leave between two steps. A thread notices the signal whatever the training thread does, and ends the process when
leaving takes longer than the grace time, or at a second Ctrl-C. Before the first step there is nothing to save, and the
signal ends the worker at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["PreemptionNotice", "TerminatedBySignal"]

THREAD_ENDS = 0  # no signal's number: the thread has nothing more to listen for
SAME_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C
AT_ONCE_S = 5.0  # where there is nothing to be saved: for closing the run's files


class TerminatedBySignal(SystemExit):
    """A signal ends this worker at once: its exit code says which."""


class PreemptionNotice:
    """While entered, SIGTERM, Ctrl-C and the signals `more` are requests to leave; `came` names the one that arrived.

    `on_notice(signum, ends_at_once)` is called by another thread as soon as one has arrived, and again where a second
    Ctrl-C ends the worker at once. Python allows this only in
    the main thread: in another one no signal is noticed. A signal that the program handles or ignores stays as it is.
    """

    def __init__(
        self, *, grace_s: float, more: Iterable[int] = (), on_notice: Callable[[int, bool], None] = lambda *_: None
    ) -> None:
        self.came = ""  # the signal's name
        self._is_at_steps = self._is_held = False
        self._grace_s, self._on_notice = grace_s, on_notice
        self._signals = {int(signal.SIGTERM), int(signal.SIGINT), *map(int, more)}
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._signal_reader, self._signal_writer = socket.socketpair()  # Python writes the signals' numbers
        self._signal_writer.setblocking(False)

    def __enter__(self) -> PreemptionNotice:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self._signals:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[signum] = signal.signal(signum, self._note)
        if self._before:
            before = signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)
            if before != -1:  # an event loop of the program reads the signals: then there is no grace time
                signal.set_wakeup_fd(before)
            os.register_at_fork(after_in_child=self._restore)  # in forked processes they have their default effect
            self._thread = threading.Thread(target=self._listen, name="paceline-notice", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.came:
            return  # this process is leaving already: a launcher that ends its workers may send another signal
        self._restore()
        if self._thread is not None:
            self._thread.join()
        self._signal_reader.close()
        if self.came in ("SIGTERM", "SIGINT"):  # the run had ended already: the signal takes effect now
            os.kill(os.getpid(), signal.Signals[self.came])

    def begin_steps(self) -> None:
        """From now on there is something to save: a request takes effect between two steps."""
        self._is_at_steps = True

    def hold(self) -> None:
        """From now on a request waits until what is being closed is closed."""
        self._is_held = True

    def _note(self, signum: int, _: FrameType | None) -> None:
        self.came = self.came or signal.Signals(signum).name
        if not self._is_at_steps and not self._is_held:
            raise TerminatedBySignal(128 + signum)

    def _listen(self) -> None:
        deadline: float | None = None
        grace_s, came_at = self._grace_s, 0.0
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._signal_reader], [], [], left_s)
            if not ready:
                self._end(grace_s)
                return
            numbers = self._signal_reader.recv(4096)
            if not numbers or THREAD_ENDS in numbers:
                return
            now = time.monotonic()
            if deadline is not None and signal.SIGINT in numbers and now - came_at > SAME_S:
                self._on_notice(signal.SIGINT, True)
                self._end_by(signal.SIGINT)
            if deadline is None and self._signals & set(numbers):
                came_at = now
                grace_s = self._grace_s if self._is_at_steps else min(AT_ONCE_S, self._grace_s)
                deadline = time.monotonic() + grace_s
                self._on_notice(min(self._signals & set(numbers)), not self._is_at_steps)

    def _end(self, grace_s: float) -> None:
        """End this process: the training thread did not finish its step in time."""
        print(
            f"paceline: this worker (pid {os.getpid()}) was asked to leave by {self.came or 'a signal'}, and did not "
            f"come to the end of its step and save within {grace_s:.0f} s (grace_s): it ends now",
            file=sys.stderr,
            flush=True,
        )
        self._end_by(signal.SIGTERM)

    @staticmethod
    def _end_by(signum: int) -> None:
        ctypes.CDLL(None).signal(signum, None)  # SIG_DFL; Python's own call is for the main thread alone
        os.kill(os.getpid(), signum)

    def _restore(self) -> None:
        """Restore the signals' handlers, in forked processes as well."""
        for signum, before in self._before.items():
            signal.signal(signum, before)
        self._before = {}
        if self._signal_writer.fileno() == -1:
            return
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._signal_writer.fileno()):
            signal.set_wakeup_fd(before)
        if os.getpid() == self._process:
            self._signal_writer.send(bytes([THREAD_ENDS]))
        self._signal_writer.close()
