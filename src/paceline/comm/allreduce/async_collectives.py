"""Collectives that threads of their own do, one step after the other, while the training thread goes on.

gloo's transfers cannot be asked whether they are done, and a wait that is broken off ends all connections. So a thread
waits, for as long as it takes, and whoever wants the result waits for the thread, and looks up every few milliseconds
whether there is still a point in it. A thread of a group that is over is left behind, and the tensor that it writes to.

There are two threads, so that one collective's waiting is another one's sending. Each takes the oldest that nobody has
taken: so the oldest of all is under way on all members, and nobody waits for ever.
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
CLOSE_TIMEOUT_S = 1.0  # for threads that have nothing to do


class AsyncCollective:
    """A collective in the hands of a thread; `wait` returns when it is done, or raises what has ended it.

    `awaited` says, while it is under way, whom this worker waits for.
    """

    def __init__(
        self, do: Callable[[AsyncCollective, ReceiveBuffers], None], *, what: str, owner: CollectiveThreads
    ) -> None:
        self.what, self.awaited = what, "others, in an earlier one"
        self._do: Callable[[AsyncCollective, ReceiveBuffers], None] | None = do
        self._owner = owner
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, aside: ReceiveBuffers) -> None:
        """Do it, in a thread."""
        do, self._do = self._do, None  # it holds a tensor, and a waiting caller may keep the collective
        try:
            if do is not None:
                do(self, aside)
        except BaseException as error:  # of whatever kind: it is raised where somebody waits
            self._error = error

    @property
    def is_over(self) -> bool:
        return self._done.is_set()

    def land(self) -> None:
        """Let go of whoever waits."""
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
        if isinstance(error, RuntimeError) and not isinstance(error, SyncError):  # torch has none for a lost peer
            lost = f"lost contact with a peer during {self.what}: {self.awaited}: {first_line(error)}"
            raise self._owner.lost(lost) from error
        if error is not None:
            raise error


class CollectiveThreads:
    """The threads of one group. `check`, asked while waiting, raises where the group is over; `lost` is raised where a
    peer has gone."""

    def __init__(
        self, *, num_threads: int, timeout_s: float, check: Callable[[], None], lost: type[SyncError] = SyncError
    ) -> None:
        self.timeout_s, self.check, self.lost = timeout_s, check, lost
        self._num_threads, self._threads = num_threads, list[threading.Thread]()
        self._waiting: queue.SimpleQueue[AsyncCollective | None] = queue.SimpleQueue()
        self._num_busy, self._lock = 0, threading.Lock()
        self._is_closed = False

    def begin(self, do: Callable[[AsyncCollective, ReceiveBuffers], None], *, what: str) -> AsyncCollective:
        """Have a thread do it."""
        if self._is_closed:
            raise SyncError("this group of workers was closed: nothing can be sent any more")
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work, name=f"paceline-walker-{number}", daemon=True)
                for number in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()
        snapshot_transfer = AsyncCollective(do, what=what, owner=self)
        self._waiting.put(snapshot_transfer)
        return snapshot_transfer

    def close(self) -> bool:
        """Let the threads end; one that is under way, in a group that is over, is left behind. Returns whether none
        was."""
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
        aside = ReceiveBuffers()
        while (snapshot_transfer := self._waiting.get()) is not None and not self._is_closed:
            with self._lock:
                self._num_busy += 1
            snapshot_transfer.run(aside)
            with self._lock:
                self._num_busy -= 1
            snapshot_transfer.land()
            del snapshot_transfer  # its tensor may be large
