"""A question that a server may hold back until other workers have done something, and for whom its asker waits.

A server that says nothing may be lost, or wait for a worker that is slow. So a worker that has waited for a while asks
it, again and again, who is *awaited*, which is never held back: a server that answers this is there, however long the
question itself takes. For whom it waits then stands in the worker's ring, as a call that those have not entered: so
whoever looks out for hangs names them, with their stacks, and ends the wait when `timeout_s` is over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.comm.messages import Caller, Message
from paceline.comm.ring import HELD, Ring, spans
from paceline.errors import SyncError

__all__ = ["HeldQuestion"]

ASK_S = 1.0  # how often it is asked who is awaited; most waits are over before
MARGIN_S = 15.0  # beyond `timeout_s`: whoever looks out for hangs knows more, and ends the wait before


class HeldQuestion:
    """One such wait of a worker, from its making to `close`; `look` and `heard` are for `Caller.answer`."""

    def __init__(
        self, caller: Caller, about: Mapping[str, Any], *, ring: Ring, worker_rank: int, timeout_s: float
    ) -> None:
        """`about` says who asks, and of which stream."""
        self._caller, self._about = caller, about
        self._ring, self._worker_rank, self._timeout_s = ring, worker_rank, timeout_s
        self._since = time.monotonic()  # the wait has been for the same as now
        self._next_at = self._since + ASK_S
        self._asked: int | None = None  # the call by which it was asked who is awaited
        self._known: tuple[Sequence[int], int] = ([], 0)  # who is, and how many updates are done
        self._group = ""  # in the ring

    def look(self) -> None:
        """Ask who is awaited, where it is time. Raises SyncError where the wait has been too long."""
        now = time.monotonic()
        if self._asked is None and now >= self._next_at:
            self._asked = self._caller.begin({**self._about, "op": "awaited"})
        if now - self._since > self._timeout_s + MARGIN_S:
            who = ", ".join(map(str, self._known[0]))
            told = f"worker {who} to do its part" if who else "others"
            raise SyncError(
                f"{self._caller.name} has held an answer back for {now - self._since:.0f} s (timeout_s is "
                f"{self._timeout_s:g}): it waits for {told}"
            )

    def heard(self, message: Message) -> None:
        """An answer to another question."""
        if message.header.get("call") != self._asked:
            return
        now = time.monotonic()
        self._asked, self._next_at = None, now + ASK_S
        known = message.header.get("awaited", []), message.header.get("done", 0)
        if known != self._known:
            self._since, self._known = now, known
            self._note()

    def close(self) -> None:
        """The wait is over."""
        if self._group:
            self._ring.leave()
            self._ring.part(self._group)
            self._group = ""

    def _note(self) -> None:
        self.close()
        awaited = [one for one in self._known[0] if one != self._worker_rank]
        if awaited:
            self._group = f"held by {spans(awaited).decode()}"
            self._ring.join(self._group, sorted([*awaited, self._worker_rank]))
            self._ring.wait(self._ring.enter(HELD, "", group=self._group))  # all alike: they are no different calls
