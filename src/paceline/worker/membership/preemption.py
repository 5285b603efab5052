"""Preemption without a supervisor: SIGTERM, or a batch system's warning, reaches the worker itself.

Under torchrun, srun or mpirun one worker may get the signal, or all of them, at different moments. A worker that gets
it only notes it. The step under way goes on, its metadata tells the other workers, and all save and leave between two
steps. A thread hears the signal whatever the training thread does, and ends the process when leaving takes longer than
the grace time. Before the first step there is nothing to save, and the signal ends the worker at once.
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
AT_ONCE_S = 5.0  # where there is nothing to be saved: for closing the books


class TerminatedBySignal(SystemExit):
    """A signal ends this worker at once: its exit code says which."""


class PreemptionNotice:
    """While entered, SIGTERM and the signals `more` are requests to leave; `came` says which has come.

    `on_notice(ends_at_once)` is called by another thread, once, as soon as one has come. Python lets only the main
    thread do this: in another one nothing is heard. A signal that the program has a use of its own for, or ignores,
    stays as it is.
    """

    def __init__(
        self, *, grace_s: float, more: Iterable[int] = (), on_notice: Callable[[bool], None] = lambda _: None
    ) -> None:
        self.came = ""  # the signal's name
        self._is_at_steps = self._is_held = False
        self._grace_s, self._on_notice = grace_s, on_notice
        self._signals = {int(signal.SIGTERM), *map(int, more)}
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._heard, self._bell = socket.socketpair()  # Python writes the number of each signal to the bell
        self._bell.setblocking(False)

    def __enter__(self) -> PreemptionNotice:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self._signals:
            if signal.getsignal(signum) == signal.SIG_DFL:
                self._before[signum] = signal.signal(signum, self._noted)
        if self._before:
            before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            if before != -1:  # an event loop of the program's is listening: then nobody looks at the grace time
                signal.set_wakeup_fd(before)
            os.register_at_fork(after_in_child=self._forget)  # whom the program forks is ended by them as usual
            self._thread = threading.Thread(target=self._listen, name="paceline-notice", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.came:
            return  # this process is on its way out, and the next signal, of an engine that tidies up, is no news
        self._forget()
        if self._thread is not None:
            self._thread.join()
        self._heard.close()
        if self.came == "SIGTERM":  # it came too late for a run that has ended well: it takes effect now
            os.kill(os.getpid(), signal.SIGTERM)

    def begin_steps(self) -> None:
        """From now on there is something to be saved: a request is heeded between two steps."""
        self._is_at_steps = True

    def hold(self) -> None:
        """From now on something is being closed that must come to its end."""
        self._is_held = True

    def _noted(self, signum: int, _: FrameType | None) -> None:
        self.came = self.came or signal.Signals(signum).name
        if not self._is_at_steps and not self._is_held:
            raise TerminatedBySignal(128 + signum)

    def _listen(self) -> None:
        deadline: float | None = None
        grace_s = self._grace_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._heard], [], [], left_s)
            if not ready:
                self._end(grace_s)
                return
            numbers = self._heard.recv(4096)
            if not numbers or THREAD_ENDS in numbers:
                return
            if deadline is None and self._signals & set(numbers):
                grace_s = self._grace_s if self._is_at_steps else min(AT_ONCE_S, self._grace_s)
                deadline = time.monotonic() + grace_s
                self._on_notice(not self._is_at_steps)

    def _end(self, grace_s: float) -> None:
        """The training thread did not come to the end of its step."""
        print(
            f"paceline: this worker (pid {os.getpid()}) was asked to leave by {self.came or 'a signal'}, and did not "
            f"come to the end of its step and save within {grace_s:.0f} s (grace_s): it ends now",
            file=sys.stderr,
            flush=True,
        )
        ctypes.CDLL(None).signal(signal.SIGTERM, None)  # SIG_DFL, from whatever thread
        os.kill(os.getpid(), signal.SIGTERM)

    def _forget(self) -> None:
        """Hear no more signals; in a process that was forked meanwhile, too."""
        for signum, before in self._before.items():
            signal.signal(signum, before)
        self._before = {}
        if self._bell.fileno() == -1:
            return
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._bell.fileno()):
            signal.set_wakeup_fd(before)
        if os.getpid() == self._process:
            self._bell.send(bytes([THREAD_ENDS]))
        self._bell.close()
