"""Transfer of values and gradients between the stages of neighboring workers: point-to-point or through shared memory.

Shared memory is `comm/shared_memory/mailboxes.py`. Both sides know the order of all messages from the schedule and
every tensor's shape from the tape, so only tensors travel. Receives are posted ahead, in the order in which the peer
sends. Sends are completed when an answer shows that they have arrived, so no worker waits for a send in the middle of a
step.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import GLOO_SUFFIX
from paceline.comm.shared_memory.mailboxes import Mailboxes
from paceline.errors import SyncError
from paceline.parallel.meta.tensor_tree import TensorSpec
from paceline.schedule.pipeline import FORWARD, Pipeline, StageMessage, messages, proofs

__all__ = ["PendingTransfer", "SharedMemoryTransport", "StageExchange", "StageTransport", "TorchTransport"]

AHEAD = 2  # receives posted beyond the one that is needed


class PendingTransfer(Protocol):
    """A transfer under way; `wait` returns when the tensor may be used, or raises SyncError."""

    def wait(self) -> None: ...


class StageTransport(Protocol):
    """Moves single tensors between workers, those of each ordered pair in the order of the calls.

    `what` is equal on both sides, and so is `way`: "stage 0 to 1". Transfers of one way are waited for in their order.
    """

    def make_room(self, num_bytes: int) -> None:
        """Prepare for tensors of up to `num_bytes`; all workers call it together, between steps."""
        ...

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> PendingTransfer:
        """Begin to send; the tensor must not change until the transfer has ended."""
        ...

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> PendingTransfer:
        """Begin to receive into `tensor`, in place."""
        ...


class TorchTransport:
    """Transfers over torch process groups, whose ranks are the workers' indices.

    `rising` carries what goes to higher indices, `falling` the rest. NCCL needs two groups: it runs the transfers of a
    pair one after the other, so two workers that both send first would deadlock. gloo needs one. `limit_s` bounds each
    wait on the CPU. On a GPU waits are put into the stream, and the group's own time limit holds.
    """

    def __init__(
        self,
        rising: dist.ProcessGroup,
        falling: dist.ProcessGroup | None = None,
        *,
        worker_index: int,
        limit_s: float,
    ) -> None:
        self._rising, self._falling = rising, falling or rising
        self._index, self._limit = worker_index, datetime.timedelta(seconds=limit_s)

    def make_room(self, num_bytes: int) -> None:
        """Nothing to prepare."""

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> PendingTransfer:
        group = self._rising if to > self._index else self._falling
        return self._begun(lambda: dist.isend(tensor, group=group, group_dst=to), tensor, f"{way}: sending {what}")

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> PendingTransfer:
        group = self._rising if source < self._index else self._falling
        said = f"{way}: waiting for {what}"
        return self._begun(lambda: dist.irecv(tensor, group=group, group_src=source), tensor, said)

    def _begun(self, begin: Callable[[], dist.Work | None], tensor: Tensor, what: str) -> PendingTransfer:
        try:
            work = begin()
        except RuntimeError as error:  # torch has no narrower type for a lost peer
            raise _lost(what, error, self._limit) from error
        if work is None:
            raise ValueError("a worker that is not in the process group cannot send in it")
        return _TorchTransfer(work, tensor, what, self._limit)


class SharedMemoryTransport:
    """Transfers between workers of one host: tensors that fit into their `mailboxes` go there, the rest `over` another
    link."""

    def __init__(self, mailboxes: Mailboxes, over: StageTransport, *, worker_index: int) -> None:
        self._mailboxes, self._over, self._index = mailboxes, over, worker_index

    def make_room(self, num_bytes: int) -> None:
        """Make the mailboxes large enough for `num_bytes`; all workers call it together, between steps. Raises
        MemoryError."""
        self._mailboxes.make_room(num_bytes)

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> PendingTransfer:
        link = self._mailboxes if self._mailboxes.takes(tensor, source=self._index, target=to) else self._over
        return link.send(tensor, to=to, what=what, way=way)

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> PendingTransfer:
        link = self._mailboxes if self._mailboxes.takes(tensor, source=source, target=self._index) else self._over
        return link.receive(tensor, source=source, what=what, way=way)


class _TorchTransfer:
    """A transfer over a process group; keeps the tensor alive until it has ended."""

    def __init__(self, work: dist.Work, tensor: Tensor, what: str, limit: datetime.timedelta) -> None:
        self._work, self._tensor, self._what, self._limit = work, tensor, what, limit

    def wait(self) -> None:
        try:
            if self._tensor.device.type == "cpu":
                self._work.wait(self._limit)
            else:
                self._work.wait()
        except RuntimeError as error:
            raise _lost(self._what, error, self._limit) from error


def _lost(what: str, error: RuntimeError, limit: datetime.timedelta) -> SyncError:
    lines = GLOO_SUFFIX.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return SyncError(f"{what} failed (limit {limit.total_seconds():g} s): {lines[0]}")


class StageExchange:
    """One worker's messages in one step."""

    def __init__(
        self,
        pipeline: Pipeline,
        worker_index: int,
        link: StageTransport,
        *,
        contents: Callable[[StageMessage], Mapping[int, tuple[TensorSpec, str]]],
        device: torch.device,
    ) -> None:
        """`contents` says what a message holds: by number of the value, its spec and its description."""
        self._pipeline, self._index, self._link = pipeline, worker_index, link
        self._contents, self._device = contents, device
        self._table = _Timetable.of(pipeline, worker_index)
        self._num_posted = dict.fromkeys(self._table.coming, 0)
        self._posted: dict[StageMessage, tuple[dict[int, Tensor], list[PendingTransfer]]] = {}
        self._local: dict[StageMessage, dict[int, Tensor]] = {}
        self._sent: dict[StageMessage, list[PendingTransfer]] = {}
        for peer in self._table.coming:
            self._post(peer, AHEAD)

    def take(self, message: StageMessage) -> dict[int, Tensor]:
        """Return the tensors of a message, by number; waits for it."""
        peer = self._pipeline.worker_of(message.by)
        if peer == self._index:
            return self._local.pop(message)
        self._post(peer, self._table.place[message] + 1 + AHEAD)
        tensors, pending = self._posted.pop(message)
        for transfer in pending:
            transfer.wait()
        if tensors:
            for proved in self._table.proved_by.get(message, ()):
                self._settle(proved)
        return tensors

    def send(self, message: StageMessage, tensors: Mapping[int, Tensor]) -> None:
        """Begin to send; the tensors must not be changed afterwards."""
        peer = self._pipeline.worker_of(message.to)
        if peer == self._index:
            self._local[message] = dict(tensors)
            return
        self._sent[message] = [
            self._link.send(tensors[number].contiguous(), to=peer, what=_what(message, says, spec), way=_way(message))
            for number, (spec, says) in self._contents(message).items()
        ]

    def finish(self) -> None:
        """Return when everything that was sent has arrived."""
        for message in list(self._sent):
            self._settle(message)

    def _settle(self, message: StageMessage) -> None:
        for transfer in self._sent.pop(message, ()):
            transfer.wait()

    def _post(self, peer: int, count: int) -> None:
        """Post receives up to the `count`-th message of a peer."""
        for message in self._table.coming[peer][self._num_posted[peer] : count]:
            tensors: dict[int, Tensor] = {}
            pending: list[PendingTransfer] = []
            for number, (spec, says) in self._contents(message).items():
                tensors[number] = torch.empty(spec.held, dtype=spec.dtype, device=self._device)
                what = _what(message, says, spec)
                pending.append(self._link.receive(tensors[number], source=peer, what=what, way=_way(message)))
            self._posted[message] = tensors, pending
            self._num_posted[peer] += 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Timetable:
    """One worker's messages in every step of a schedule.

    `coming`: messages from each peer, in order; `place`: the index of each among them; `proved_by`: which sends each
    message shows to have arrived.
    """

    coming: dict[int, tuple[StageMessage, ...]]
    place: dict[StageMessage, int]
    proved_by: dict[StageMessage, list[StageMessage]]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, pipeline: Pipeline, worker_index: int) -> _Timetable:
        peers = (peer for peer in range(pipeline.num_workers) if peer != worker_index)
        coming = {peer: messages(pipeline, peer, worker_index) for peer in peers}
        proved_by: dict[StageMessage, list[StageMessage]] = {}
        for message, proof in proofs(pipeline, worker_index).items():
            proved_by.setdefault(proof, []).append(message)
        place = {message: place for each in coming.values() for place, message in enumerate(each)}
        return cls(coming=coming, place=place, proved_by=proved_by)


@functools.lru_cache(maxsize=1024)
def _what(message: StageMessage, says: str, spec: TensorSpec) -> str:
    kind = "" if message.kind == FORWARD else "the gradient of "
    return f"{kind}{says} ({spec}) of micro-batch {message.micro}"


@functools.lru_cache(maxsize=1024)
def _way(message: StageMessage) -> str:
    return f"stage {message.by} to {message.to}"
