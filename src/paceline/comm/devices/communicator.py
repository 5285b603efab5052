"""A device communicator, as NCCL's documentation describes one, and how it is made for a generation of members.

What the documentation says, and what follows for callers ("Fault Tolerance", "Communicator Creation and Management
Functions"):

 - A collective is enqueued in a stream. When a member is lost it never ends: nothing tells the others.
 - `ncclCommAbort` ends the kernels that hang. What they were to write is undefined, and no error marks it.
 - Each member has to abort its own communicator; the others' kernels do not notice.
 - A communicator that was aborted is gone. Its members make another one, with a new unique id.
 - `ncclCommInitRankConfig` waits until all members have come. With `blocking=0` it can be aborted meanwhile.
 - `ncclCommGetAsyncError` tells of errors that a member has noticed by itself, such as a closed connection.

`ncclCommShrink` would keep the remaining members' connections. It needs a communicator that all of them hold, so
newcomers would need another way; a new communicator serves both.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from paceline.comm.group import Disrupted, first_line

__all__ = ["Communicator", "CommunicatorWork", "connect_communicator"]

POLL_S = 0.01
ABANDONED_S = 5.0  # to notice an abort, before the thread that connects is left behind


class CommunicatorWork(Protocol):
    """A collective that was enqueued."""

    def wait(self) -> Any:
        """Have the current stream wait. Returns though the collective was aborted: nothing tells so."""
        ...

    def is_completed(self) -> bool:
        """Whether the device is done with it, also where it was aborted. Does not block. Raises RuntimeError where it
        has failed otherwise: the device may not be done with it then."""
        ...


class Communicator(Protocol):
    """One member's end. All members enqueue the same collectives in the same order.

    `abort` may be called by any thread at any time. Afterwards every other call raises RuntimeError.
    """

    def connect(self) -> None:
        """Return when all members have come; raises RuntimeError when aborted meanwhile."""
        ...

    def all_reduce(self, tensor: Tensor) -> CommunicatorWork: ...

    def all_gather(self, tensor: Tensor, out: Sequence[Tensor]) -> CommunicatorWork: ...

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommunicatorWork: ...

    def all_to_all(self, parts: Sequence[Tensor], out: Sequence[Tensor]) -> CommunicatorWork: ...

    def broadcast(self, tensor: Tensor, source: int) -> CommunicatorWork: ...

    def error(self) -> str | None:
        """What this member has noticed by itself; None: nothing. Does not block."""
        ...

    def abort(self) -> None:
        """End what is enqueued here; blocks until nothing of it runs."""
        ...


def connect_communicator(communicator: Communicator, check: Callable[[], None]) -> None:
    """Connect with all members. Raises what `check` raises meanwhile, and Disrupted where a member cannot connect; the
    communicator is aborted then.

    A thread connects, because that may wait for a member that was lost: nothing else would end it. Another one aborts,
    because torch holds a lock while it waits. Both are left behind where they take too long.
    """
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            communicator.connect()
            done.put(None)
        except BaseException as error:  # any kind: it is raised in the waiting caller
            done.put(error)

    thread = threading.Thread(target=connect, name="paceline-communicator", daemon=True)
    thread.start()
    while True:
        try:
            error = done.get(timeout=POLL_S)
        except queue.Empty:
            try:
                check()
            except BaseException:
                _abort(communicator, ABANDONED_S)
                thread.join(ABANDONED_S)
                raise
            continue
        if error is None:
            return
        _abort(communicator, ABANDONED_S)
        check()
        if isinstance(error, RuntimeError):
            raise Disrupted(f"the workers' devices could not all connect: {first_line(error)}") from error
        raise error


def _abort(communicator: Communicator, limit_s: float) -> None:
    """Abort a communicator that takes no tensors of the caller yet, for at most so long."""

    def abort() -> None:
        with contextlib.suppress(Exception):  # there is an error already that says why
            communicator.abort()

    thread = threading.Thread(target=abort, name="paceline-abort", daemon=True)
    thread.start()
    thread.join(limit_s)
