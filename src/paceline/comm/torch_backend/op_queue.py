"""Runs the operations of one group one after the other: in a thread that waits for one of them, or in a thread of its
own.

torch's collectives proceed by themselves once called; shared memory proceeds only when a worker calls in. So calls are
put into a queue. A thread that waits for an operation runs all operations before it, and it, at once: no other thread
has to wake up. A background thread runs operations that no caller waits for yet, so peers get their results while this
worker computes, and futures complete by themselves.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["OpQueue", "QueuedOp"]

POLL_S = 0.02  # for those who wait while another thread is at work


class QueuedOp:
    """An operation in the line. `result` is what its future holds: the tensors that it fills."""

    def __init__(self, do: Callable[[], None], result: Any, line: OpQueue) -> None:
        self.result = result
        self.error: BaseException | None = None
        self.is_done = False
        self._do: Callable[[], None] | None = do
        self._line = line
        self._lock = threading.Lock()
        self._done: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._untold: torch.futures.Future[Any] | None = None  # was asked for before it was done

    def wait(self, limit_s: float | None = None) -> bool:
        """Return whether it is done, at the latest after `limit_s`; raises what has ended it."""
        if not self.is_done:
            self._line.finish(self, limit_s)
        if self.is_done and self.error is not None:
            raise self.error
        return self.is_done

    def future(self) -> torch.futures.Future[Any]:
        """Return what ends when it is done, without anybody's waiting."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_done:
                    self._fill(self._future)
        self._line.wake()
        return self._future

    def done(self) -> threading.Event:
        """Return what is set when it is done."""
        with self._lock:
            if self._done is None:
                self._done = threading.Event()
                if self.is_done:
                    self._done.set()
            return self._done

    @property
    def has_to_tell(self) -> bool:
        """Whether it is done, and its future does not know."""
        return self._untold is not None

    def run(self) -> None:
        """Do it; an error is kept for whoever waits. Then its future has to be told."""
        do, self._do = self._do, None
        try:
            if do is not None:
                do()
        except Exception as error:  # of whatever kind: it is raised where somebody waits
            self.error = error
        except BaseException as error:  # Ctrl-C: of this thread, and nobody else may wait for what was broken off
            self.error = error
            raise
        finally:
            del do  # what it refers to may be large
            with self._lock:
                self.is_done = True
                self._untold, event = self._future, self._done
            if event is not None:
                event.set()

    def tell(self) -> None:
        """End the future: what hangs on it runs here, and may begin other operations and wait for them."""
        future, self._untold = self._untold, None
        if future is not None:
            self._fill(future)

    def _fill(self, future: torch.futures.Future[Any]) -> None:
        if self.error is None:
            future.set_result(self.result)
        elif isinstance(self.error, Exception):
            future.set_exception(self.error)
        else:  # a future takes no other errors
            future.set_exception(RuntimeError(f"a collective was broken off by {type(self.error).__name__}"))


class OpQueue:
    """A line of operations. Any thread may use it."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._line: deque[QueuedOp] = deque()
        self._running = threading.Lock()  # whoever has it does the next operation
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None  # that has to do what is in the line
        self._hiring = threading.Lock()
        self._is_closed = False

    def begin(self, do: Callable[[], None], *, result: Any, is_awaited: bool) -> QueuedOp:
        """Put an operation into the line. `is_awaited`: the caller will wait for it at once."""
        turn = QueuedOp(do, result, self)
        self._line.append(turn)
        if not is_awaited:
            self.wake()
        return turn

    def finish(self, turn: QueuedOp, limit_s: float | None) -> None:
        """Return when an operation is done, or after a time."""
        ends = None if limit_s is None else time.monotonic() + limit_s
        while not turn.is_done and (ends is None or time.monotonic() < ends):
            if ends is None and self._running.acquire(blocking=False):
                self._do_next()
            else:  # another thread is at it, or may have to go on when the time is up
                self.wake()
                turn.done().wait(POLL_S if ends is None else max(0.0, ends - time.monotonic()))

    def wake(self) -> None:
        """Have a thread do what is in the line."""
        if not self._line or self._is_closed:
            return
        with self._hiring:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Let the thread end. What is in the line is done by those who wait for it."""
        self._is_closed = True
        self._woken.set()

    def _do_next(self) -> None:
        """Do the next operation and let go of the line; then end its future, also where Ctrl-C has broken it off."""
        turn = None
        try:
            turn = self._line.popleft() if self._line else None
            if turn is not None:
                turn.run()
        finally:
            self._running.release()
            if turn is not None and turn.has_to_tell:
                self._tell(turn)

    def _serve(self) -> None:
        own = threading.current_thread()
        while self._thread is own and not self._is_closed:
            self._woken.wait()
            self._woken.clear()
            while self._line and self._thread is own and not self._is_closed:
                self._running.acquire()
                self._do_next()

    def _tell(self, turn: QueuedOp) -> None:
        """End a future. What hangs on it may wait for another operation: where this is the thread that would do it,
        somebody else must be free to."""
        own = threading.current_thread()
        with self._hiring:
            is_serving = self._thread is own
            if is_serving:
                self._thread = None
        turn.tell()
        with self._hiring:
            if is_serving and self._thread is None:
                self._thread = own
