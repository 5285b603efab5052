"""What passes between the stages of a replica, as the ring shows it: who waits for which value of which micro-batch.

Each way between two stages is a group of its own in the ring, in which both workers count what goes there: the one who
sends as it begins, the other one as it begins to wait. So who has entered less is the one who is awaited.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.ring import Ring
from paceline.parallel.stages.link import Link, Pending

__all__ = ["NotedLink"]

KIND = "transfer"
NUM_FOLLOWED = 2  # stages of a worker whose ways are noted: a ring has places for so many groups


class NotedLink:
    """A link whose waits show in the ring."""

    def __init__(self, link: Link, *, members: Sequence[int], index: int, ring: Ring) -> None:
        """`members`: the worker ranks of the stages' workers, of whom this is the one at `index`."""
        self._link, self._members, self._index, self._ring = link, tuple(members), index, ring
        self._names: dict[tuple[str, tuple[int, int]], str | None] = {}

    def make_room(self, num_bytes: int) -> None:
        """Be told that tensors have up to so many bytes from now on."""
        self._link.make_room(num_bytes)

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> Pending:
        """Begin to send; the tensor may not change before the end."""
        group = self._group(way, (self._index, to))
        call = self._enter(tensor, what, group)
        return _Noted(self._link.send(tensor, to=to, what=what, way=way), self, tensor, what, group, call)

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> Pending:
        """Begin to receive into `tensor`, in place."""
        group = self._group(way, (source, self._index))
        return _Noted(self._link.receive(tensor, source=source, what=what, way=way), self, tensor, what, group, None)

    def wait(self, pending: Pending, tensor: Tensor, what: str, group: str | None, call: int | None) -> None:
        """Wait for a transfer. After an error the ring shows it still: it may be the cause."""
        if group is None:
            pending.wait()
            return
        entered = self._enter(tensor, what, group) if call is None else call
        self._ring.wait(entered or 0)
        pending.wait()
        self._ring.leave()

    def _enter(self, tensor: Tensor, what: str, group: str | None) -> int | None:
        if group is None:
            return None
        return self._ring.enter(KIND, what, dtype=tensor.dtype, numel=tensor.numel(), group=group, is_of_phase=True)

    def _group(self, way: str, pair: tuple[int, int]) -> str | None:
        """The ring's group for a way; None: it is not noted."""
        if (way, pair) not in self._names:
            stages = [int(word) for word in way.split() if word.isdecimal()]
            is_followed = max(stages, default=0) < NUM_FOLLOWED * len(self._members)
            first, second = (self._members[index] for index in pair)
            self._names[way, pair] = f"{way}, workers {first} to {second}" if is_followed else None
        name = self._names[way, pair]
        if name is not None and not self._ring.is_in(name):
            self._ring.join(name, sorted(self._members[index] for index in pair))
        return name


class _Noted:
    def __init__(
        self, pending: Pending, link: NotedLink, tensor: Tensor, what: str, group: str | None, call: int | None
    ) -> None:
        self._pending, self._link, self._tensor = pending, link, tensor
        self._what, self._group, self._call = what, group, call

    def wait(self) -> None:
        self._link.wait(self._pending, self._tensor, self._what, self._group, self._call)
