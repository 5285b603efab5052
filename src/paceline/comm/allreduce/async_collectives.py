"""Runs collectives in background threads while the training thread continues, like async_op=True of torch.distributed.

gloo's transfers cannot be polled, and a wait that times out closes all connections. So a thread waits for as long as it
takes. The caller that needs the result waits for the thread, and checks every few milliseconds whether the group still
exists. If the group has ended, the thread and the tensor that it writes to are abandoned.

Two threads overlap one collective's waiting with another one's sending. Each takes the oldest collective that has not
been started. So all members run the oldest one, and there is no deadlock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from paceline.comm.allreduce.schedule_executor import ReceiveBuffers
from paceline.comm.group import first_line
from paceline.errors import SyncError

__all__ = ["AsyncCollective", "CollectiveThreads"]

POLL_S = 0.02
CLOSE_TIMEOUT_S = 1.0  # for idle threads to end


class AsyncCollective:
    """A collective that a background thread runs; `wait` returns when it is done, or raises the error that ended it.

    `awaited` names the worker that this one waits for at the moment.
    """

    def __init__(
        self, do: Callable[[AsyncCollective, ReceiveBuffers], None], *, what: str, owner: CollectiveThreads
    ) -> None:
        self.what, self.awaited = what, "others, in an earlier one"
        self._do: Callable[[AsyncCollective, ReceiveBuffers], None] | None = do
        self._owner = owner
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, buffers: ReceiveBuffers) -> None:
        """Run the collective; called by the thread."""
        do, self._do = self._do, None  # it refers to a tensor, and a waiting caller may keep the collective
        try:
            if do is not None:
                do(self, buffers)
        except BaseException as error:  # any kind: it is raised in the waiting caller
            self._error = error

    @property
    def is_over(self) -> bool:
        return self._done.is_set()

    def complete(self) -> None:
        """Wake waiting callers."""
        self._done.set()

    def wait(self) -> None:
        began = time.monotonic()
        while not self._done.wait(POLL_S):
            self._owner.check()
            if (waited_s := time.monotonic() - began) > self._owner.timeout_s:
                raise SyncError(
                    f"waited {waited_s:.1f} s in {self.what} for {self.awaited}: stopped, stuck, or taking other steps "
                    "than the rest. A longer timeout_s waits longer"
                )
        error = self._error
        # torch raises plain RuntimeError for a lost peer.
        if isinstance(error, RuntimeError) and not isinstance(error, SyncError):
            lost = f"lost contact with a peer during {self.what}: {self.awaited}: {first_line(error)}"
            raise self._owner.lost(lost) from error
        if error is not None:
            raise error


class CollectiveThreads:
    """The threads of one group. `check`, called while waiting, raises if the group has ended; `lost` is raised if a
    peer was lost."""

    def __init__(
        self, *, num_threads: int, timeout_s: float, check: Callable[[], None], lost: type[SyncError] = SyncError
    ) -> None:
        self.timeout_s, self.check, self.lost = timeout_s, check, lost
        self._num_threads, self._threads = num_threads, list[threading.Thread]()
        self._waiting: queue.SimpleQueue[AsyncCollective | None] = queue.SimpleQueue()
        self._num_busy, self._lock = 0, threading.Lock()
        self._is_closed = False

    def begin(self, do: Callable[[AsyncCollective, ReceiveBuffers], None], *, what: str) -> AsyncCollective:
        """Queue a collective for the threads."""
        if self._is_closed:
            raise SyncError("this group of workers was closed: nothing can be sent any more")
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"paceline-collectives-{number}", daemon=True)
                for number in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()
        collective = AsyncCollective(do, what=what, owner=self)
        self._waiting.put(collective)
        return collective

    def close(self) -> bool:
        """End the threads and return whether all have ended; a busy thread is abandoned."""
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put(None)
        if not self._num_busy:
            self.join(CLOSE_TIMEOUT_S)
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, limit_s: float | None = None) -> None:
        """Return when all threads have ended, or after a time."""
        for thread in self._threads:
            thread.join(limit_s)

    def _work(self) -> None:
        buffers = ReceiveBuffers()
        while (collective := self._waiting.get()) is not None and not self._is_closed:
            with self._lock:
                self._num_busy += 1
            collective.run(buffers)
            with self._lock:
                self._num_busy -= 1
            collective.complete()
            del collective  # its tensor may be large
