"""Tensor, context and expert parallel groups and pipeline links that note their calls in the flight recorder.

Each direction between two pipeline stages is a group of its own in the flight recorder, in which both workers count
transfers: the sender as it begins to send, the receiver as it begins to wait. So the worker with fewer calls is the one
that the other waits for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.parallel.pipeline.stage_transfer import PendingTransfer, StageTransport
from paceline.parallel.tensor.collectives import TrafficCounter

__all__ = ["RecordedContextGroup", "RecordedExpertGroup", "RecordedStageLink", "RecordedTensorGroup"]


class RecordedTensorGroup:
    """The tensor parallel group, recorded."""

    what = "a tensor parallel layer"

    def __init__(self, group: WorkerGroup) -> None:
        self.index, self.size = group.index, group.size
        self.traffic = TrafficCounter()
        self.waited_s = 0.0  # for the others, in all; on a GPU no call waits
        self.is_still = False
        self._group = group

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of all collectives of the group."""
        return sum(self.traffic.num_bytes.values())

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While entered, collectives send nothing, and only the shapes of their results are right: each worker can
        trace a forward alone."""
        former, self.is_still = self.is_still, True
        try:
            yield
        finally:
            self.is_still = former

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of all workers' tensors, in new memory."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        if self.is_still:
            return out
        self._timed("all_reduce", out, lambda what: self._group.all_reduce(out, what=what).wait())
        return out

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all workers' tensors, by index."""
        if self.is_still:
            return [tensor] * self.size
        whole = tensor.new_empty(self.size, *tensor.shape)
        parts = list(whole.unbind())
        self._timed("all_gather", whole, lambda what: self._group.all_gather(tensor.contiguous(), parts, what=what))
        return parts

    def reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        """Return the sum over all workers of `parts[index]`, for this worker's index."""
        if self.is_still:
            return parts[self.index].clone()
        whole = torch.stack(parts)
        out, given = torch.empty_like(whole[0]), whole.unbind()
        self._timed("reduce_scatter", whole, lambda what: self._group.reduce_scatter(given, out, what=what))
        return out

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send `parts[k]` to worker k, and return what each worker k sent here, of `shapes[k]`."""
        if self.is_still:
            return [parts[0].new_zeros(shape) for shape in shapes]
        given = [part.contiguous() for part in parts]
        out = [parts[0].new_empty(shape) for shape in shapes]
        num_bytes = sum(part.numel() * part.element_size() for part in given)
        self._timed("all_to_all", num_bytes, lambda what: self._group.all_to_all(given, out, what=what))
        return out

    def _timed(self, kind: str, moved: Tensor | int, move: Callable[[str], None]) -> None:
        """Do a collective that moves a whole tensor, or a number of bytes."""
        began = time.perf_counter()
        move(f"{kind} of {self.what}")
        self.waited_s += time.perf_counter() - began
        self.traffic.note(kind, moved if isinstance(moved, int) else moved.numel() * moved.element_size())


class RecordedContextGroup(RecordedTensorGroup):
    """The context parallel group, recorded."""

    what = "a shared sequence"


class RecordedExpertGroup(RecordedTensorGroup):
    """The expert parallel group, recorded; it also exchanges tokens."""

    what = "tokens and their experts"

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to worker 0, the next to worker 1 and so on; return the rows received, by
        worker.
        """
        result = rows.new_empty(sum(received), *rows.shape[1:])
        parts, out = rows.split(list(sent)), result.split(list(received))
        num_bytes = sum(part.nbytes for part in parts) - parts[self.index].nbytes
        self._timed("all_to_all", num_bytes, lambda what: self._group.all_to_all(parts, out, what=what))
        return result


KIND = "transfer"
NUM_RECORDED_STAGES = 2  # stages of a worker whose directions are recorded: the recorder has slots for so many groups


class RecordedStageLink:
    """A pipeline link that records its waits."""

    def __init__(self, link: StageTransport, *, members: Sequence[int], index: int, recorder: FlightRecorder) -> None:
        """`members`: the worker ranks of the stages' workers, of which this is the one at `index`."""
        self._link, self._members, self._index, self._recorder = link, tuple(members), index, recorder
        self._names: dict[tuple[str, tuple[int, int]], str | None] = {}

    def make_room(self, num_bytes: int) -> None:
        """Prepare for tensors of up to this many bytes."""
        self._link.make_room(num_bytes)

    def send(self, tensor: Tensor, *, to: int, what: str, way: str) -> PendingTransfer:
        """Begin to send; the tensor must not change before the end."""
        group = self._group(way, (self._index, to))
        call = self._enter(tensor, what, group)
        return _RecordedTransfer(self._link.send(tensor, to=to, what=what, way=way), self, tensor, what, group, call)

    def receive(self, tensor: Tensor, *, source: int, what: str, way: str) -> PendingTransfer:
        """Begin to receive into `tensor`, in place."""
        group = self._group(way, (source, self._index))
        return _RecordedTransfer(
            self._link.receive(tensor, source=source, what=what, way=way), self, tensor, what, group, None
        )

    def wait(self, pending: PendingTransfer, tensor: Tensor, what: str, group: str | None, call: int | None) -> None:
        """Wait for a transfer. After an error the recorder still shows it: it may be the cause."""
        if group is None:
            pending.wait()
            return
        entered = self._enter(tensor, what, group) if call is None else call
        self._recorder.wait(entered or 0)
        pending.wait()
        self._recorder.leave()

    def _enter(self, tensor: Tensor, what: str, group: str | None) -> int | None:
        if group is None:
            return None
        return self._recorder.enter(KIND, what, dtype=tensor.dtype, numel=tensor.numel(), group=group, is_of_phase=True)

    def _group(self, way: str, pair: tuple[int, int]) -> str | None:
        """The recorder's group for a direction; None: it is not recorded."""
        if (way, pair) not in self._names:
            stages = [int(word) for word in way.split() if word.isdecimal()]
            is_recorded = max(stages, default=0) < NUM_RECORDED_STAGES * len(self._members)
            first, second = (self._members[index] for index in pair)
            self._names[way, pair] = f"{way}, workers {first} to {second}" if is_recorded else None
        name = self._names[way, pair]
        if name is not None and not self._recorder.is_in(name):
            self._recorder.join(name, sorted(self._members[index] for index in pair))
        return name


class _RecordedTransfer:
    def __init__(
        self,
        pending: PendingTransfer,
        link: RecordedStageLink,
        tensor: Tensor,
        what: str,
        group: str | None,
        call: int | None,
    ) -> None:
        self._pending, self._link, self._tensor = pending, link, tensor
        self._what, self._group, self._call = what, group, call

    def wait(self) -> None:
        self._link.wait(self._pending, self._tensor, self._what, self._group, self._call)
