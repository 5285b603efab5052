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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["OpQueue", "QueuedOp", "QueuedWork"]

POLL_S = 0.02  # for those who wait while another thread is at work


class QueuedOp:
    """An operation in the queue. `result`: the tensors that it fills, which become the value of its future."""

    def __init__(self, do: Callable[[], None], result: Any, queue: OpQueue) -> None:
        self.result = result
        self.error: BaseException | None = None
        self.is_done = False
        self._do: Callable[[], None] | None = do
        self._queue = queue
        self._lock = threading.Lock()
        self._done: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._pending_future: torch.futures.Future[Any] | None = None  # handed out before the operation was done

    def wait(self, limit_s: float | None = None) -> bool:
        """Return whether it is done, at the latest after `limit_s`; raise the error that ended it."""
        if not self.is_done:
            self._queue.finish(self, limit_s)
        if self.is_done and self.error is not None:
            raise self.error
        return self.is_done

    def future(self) -> torch.futures.Future[Any]:
        """Return a future that completes by itself when the operation is done."""
        with self._lock:
            if self._future is None:
                self._trigger: torch.futures.Future[None] = torch.futures.Future()
                self._future = self._trigger.then(self._outcome)
                if self.is_done:
                    self._trigger.set_result(None)
        self._queue.wake()
        return self._future

    def done(self) -> threading.Event:
        """Return an event that is set when the operation is done."""
        with self._lock:
            if self._done is None:
                self._done = threading.Event()
                if self.is_done:
                    self._done.set()
            return self._done

    @property
    def has_pending_future(self) -> bool:
        """Whether the operation is done, and its future still has to be completed."""
        return self._pending_future is not None

    def run(self) -> None:
        """Run the operation; an error is kept for waiting callers. Afterwards its future has to be completed."""
        do, self._do = self._do, None
        try:
            if do is not None:
                do()
        except Exception as error:  # any kind: it is raised in the waiting caller
            self.error = error
        except BaseException as error:  # Ctrl-C in this thread: it goes on here, and other callers must not wait
            self.error = error
            raise
        finally:
            del do  # it may keep large tensors alive
            with self._lock:
                self.is_done = True
                self._pending_future, event = self._future, self._done
            if event is not None:
                event.set()

    def complete_future(self) -> None:
        """Complete the future; its callbacks run here, and may begin other operations and wait for them."""
        future, self._pending_future = self._pending_future, None
        if future is not None:
            self._trigger.set_result(None)

    def _outcome(self, _: object) -> Any:
        """Return the result or raise the error, as the end of the future. What is raised here is an error to C++ code
        that waits, such as DistributedDataParallel's; `set_exception` would hand it the exception as if it were the
        tensors, and end the process."""
        if self.error is None:
            return self.result
        if isinstance(self.error, Exception):
            raise dist.DistBackendError(str(self.error)) from None  # torch prints it, with its traceback
        raise RuntimeError(f"a collective was broken off by {type(self.error).__name__}")  # futures take no other


class OpQueue:
    """A queue of operations, run one at a time. Any thread may use it."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._queue: deque[QueuedOp] = deque()
        self._running = threading.Lock()  # the thread that holds it runs the next operation
        self._wakeup = threading.Event()
        self._thread: threading.Thread | None = None  # the background thread
        self._thread_lock = threading.Lock()
        self._is_closed = False

    def begin(self, do: Callable[[], None], *, result: Any, is_awaited: bool) -> QueuedOp:
        """Put an operation into the queue. `is_awaited`: the caller will wait for it immediately."""
        op = QueuedOp(do, result, self)
        self._queue.append(op)
        if not is_awaited:
            self.wake()
        return op

    def finish(self, op: QueuedOp, limit_s: float | None) -> None:
        """Return when an operation is done, or after a time."""
        ends = None if limit_s is None else time.monotonic() + limit_s
        while not op.is_done and (ends is None or time.monotonic() < ends):
            if ends is None and self._running.acquire(blocking=False):
                self._do_next()
            else:  # another thread runs an operation, or must continue when this caller's time is up
                self.wake()
                op.done().wait(POLL_S if ends is None else max(0.0, ends - time.monotonic()))

    def wake(self) -> None:
        """Let the background thread run the queued operations."""
        if not self._queue or self._is_closed:
            return
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._wakeup.set()

    def close(self) -> None:
        """End the background thread. Operations still in the queue are run by the callers that wait for them."""
        self._is_closed = True
        self._wakeup.set()

    def _do_next(self) -> None:
        """Run the next operation and release the queue; then complete its future, also after Ctrl-C."""
        op = None
        try:
            op = self._queue.popleft() if self._queue else None
            if op is not None:
                op.run()
        finally:
            self._running.release()
            if op is not None and op.has_pending_future:
                self._complete_future(op)

    def _serve(self) -> None:
        own = threading.current_thread()
        while self._thread is own and not self._is_closed:
            self._wakeup.wait()
            self._wakeup.clear()
            while self._queue and self._thread is own and not self._is_closed:
                self._running.acquire()
                self._do_next()

    def _complete_future(self, op: QueuedOp) -> None:
        """Complete a future. Its callbacks may wait for another operation, which this thread would have to run. So
        another background thread may be started meanwhile."""
        own = threading.current_thread()
        with self._thread_lock:
            is_serving = self._thread is own
            if is_serving:
                self._thread = None
        op.complete_future()
        with self._thread_lock:
            if is_serving and self._thread is None:
                self._thread = own


class QueuedWork(dist.Work):
    """The `Work` that torch gets for a collective."""

    def __init__(self, op: QueuedOp) -> None:
        super().__init__()
        self._op = op

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        if not self._op.wait(limit_s):
            raise dist.DistBackendError(
                f"a collective timed out: it was not done within {limit_s:g} s, as other workers have not called it"
            )
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._op.future()

    def is_completed(self) -> bool:
        return self._op.is_done

    def is_success(self) -> bool:
        return self._op.is_done and self._op.error is None

    def exception(self) -> BaseException | None:
        return self._op.error

    def result(self) -> Any:
        return self._op.result

    def synchronize(self) -> None:
        self.wait()
