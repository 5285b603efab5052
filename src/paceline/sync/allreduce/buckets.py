"""Buckets: gradients that travel together in one flat buffer.

Backward reaches the last layers first, so buckets are filled from the last parameter to the first. Each bucket can
leave while backward still works on earlier layers. Of sharded parameters a bucket holds the local rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.base import CodecContext, GatherPayload, Payload, Rounds, SumPayload
from paceline.codec.build import build_codec
from paceline.codec.error_feedback import ErrorFeedback
from paceline.comm.group import SingleWorkerGroup, Transfer, WorkerGroup
from paceline.comm.sharded_tensors import as_local_of, local_part
from paceline.plan import Wire
from paceline.sync.allreduce.replica_norms import square_of

__all__ = [
    "Bucket",
    "LocalBucket",
    "NamedParameter",
    "SentBytes",
    "WireObserver",
    "WireShares",
    "assign",
    "bytes_of_sum",
]

NamedParameter = tuple[str, Parameter]
ALONE = SingleWorkerGroup()


@dataclasses.dataclass(slots=True)
class SentBytes:
    """What this worker has sent to other replicas, and what that would have been without a codec."""

    num_sent: int = 0
    num_raw: int = 0

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.num_sent + other.num_sent, self.num_raw + other.num_raw)


class WireShares(NamedTuple):
    """What became of one parameter's gradient on a wire with error feedback, as rows of numbers."""

    given: Tensor  # this replica's gradient, before anything was added
    came: Tensor  # the sum over the replicas, as it was decoded
    kept: Tensor  # this replica's error feedback for the next step


class WireObserver(Protocol):
    """Follows what wires with error feedback send and keep; only `paceline parity` does."""

    def settled(self, shares: Mapping[str, WireShares], group: WorkerGroup) -> None:
        """Called by each worker of `group` for each bucket of a step that is taken; `shares` by parameter name."""
        ...


def assign(
    parameters: Sequence[NamedParameter],
    *,
    bucket_bytes: int,
    group_of: Callable[[Parameter], WorkerGroup],
    kind_of: Callable[[Parameter], Hashable] = lambda _: None,
) -> list[tuple[WorkerGroup, list[NamedParameter]]]:
    """Divide parameters, last first, into runs of one group, kind, dtype and device.

    A run has at most `bucket_bytes` (or one parameter). Runs are in the order in which they become full, so none waits
    for a later one.
    """
    runs: list[tuple[WorkerGroup, list[NamedParameter]]] = []
    is_open: dict[Hashable, tuple[list[NamedParameter], int]] = {}  # run, bytes in it
    order: dict[str, int] = {}
    for name, parameter in reversed(parameters):
        order[name] = len(order)
        group = group_of(parameter)
        kind = (id(group), kind_of(parameter), parameter.dtype, parameter.device)
        size = local_part(parameter).numel() * parameter.element_size()
        run, filled = is_open.get(kind, ([], bucket_bytes))
        if not run or filled + size > bucket_bytes:
            run, filled = [], 0
            runs.append((group, run))
        run.append((name, parameter))
        is_open[kind] = (run, filled + size)
    return sorted(runs, key=lambda one: order[one[1][-1][0]])


class Bucket:
    """One flat buffer, a view of it per parameter, and the exchange under way.

    `depart` copies the gradients in and starts the codec's first round. Each `advance` takes a round's answer and
    starts the next one, until the sum over replicas is in each parameter's `grad`.
    """

    observer: WireObserver | None = None

    def __init__(
        self, parameters: Sequence[NamedParameter], *, group: WorkerGroup, wire: Wire, metadata_capacity: int = 0
    ) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.bytes = SentBytes()
        self.encoding_s = 0.0  # total, decoding included
        self.waited_s = 0.0  # while its last round was sent
        self._group = group
        self._span = _span(self.names)
        self._locals = [local_part(parameter) for parameter in self.parameters]
        first = self._locals[0]
        self._codec = build_codec(wire, shapes=[_rows_and_columns(one) for one in self._locals], dtype=first.dtype)
        self.can_carry_metadata = self._codec.exact and first.dtype in (torch.float32, torch.float64)
        self._num_elements = sum(local.numel() for local in self._locals)
        self._num_sent = self._num_elements
        metadata_capacity = metadata_capacity if self.can_carry_metadata else 0
        place = group if self._codec.exact else ALONE  # otherwise another tensor is sent
        self._flat = place.allocate(self._num_elements + metadata_capacity, dtype=first.dtype, device=first.device)
        self._views = _views(self._flat, self._locals)
        self._gradients = [as_local_of(v, like=p) for v, p in zip(self._views, self.parameters, strict=True)]
        self._is_measured: Callable[[Parameter], bool] | None = None
        self._square: Tensor | None = None
        self._rounds: Rounds | None = None
        self._num_rounds = 0  # rounds that have begun
        self._answer: Tensor | None = None
        self._transfer: Transfer | None = None
        self._given: Tensor | None = None  # what it got and what came of it in this step, where that is observed
        self._came: Tensor | None = None

    def begin(self, *, is_measured: Callable[[Parameter], bool] | None) -> None:
        """Begin a gradient pass; `is_measured(parameter)`: the norm of its local gradient is needed before it is
        summed."""
        self._is_measured, self._square = is_measured, None

    def square(self) -> Tensor:
        """Return the square of that norm, 0-d: as recorded when the bucket left, or else of the current gradients."""
        if self._square is None:
            self._square = square_of(filter(self._is_measured, self.parameters), device=self._flat.device)
        return self._square

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
        """Start to sum the gradients over the replicas; a parameter without a gradient contributes zeros."""
        self._begin()
        self._num_sent = self._num_elements + len(metadata)
        if metadata:
            self._flat[self._num_elements : self._num_sent] = torch.tensor(metadata, dtype=self._flat.dtype)
        self.bytes.num_raw += bytes_of_sum(self._num_sent * self._flat.itemsize, self._group.size)
        self._num_rounds = 0
        replica = CodecContext(index=self._group.index, count=self._group.size, seed=seed)
        self._rounds = self._codec.exchange(self._flat[: self._num_sent], replica)
        began = time.perf_counter()
        payload = next(self._rounds)
        self.encoding_s += time.perf_counter() - began
        self._send(payload)

    def advance(self) -> bool:
        """Block until the current round is over, and start the next; returns False if it was the last one."""
        if self._rounds is None or self._transfer is None or self._answer is None:
            raise RuntimeError("advance() without depart()")
        self._transfer.wait()
        began = time.perf_counter()
        try:
            payload = self._rounds.send(self._answer)
        except StopIteration:
            self._rounds = self._answer = self._transfer = None
            if self._given is not None:
                self._came = self._flat[: self._num_elements].clone()
            return False
        finally:
            self.encoding_s += time.perf_counter() - began
        self._send(payload)
        return True

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The local parameters' shapes, as matrices."""
        return [_rows_and_columns(one) for one in self._locals]

    @property
    def may_send_more(self) -> bool:
        """Whether the current round may be followed by another one."""
        return self._rounds is not None and self._num_rounds < self._codec.num_rounds

    def land(self) -> None:
        """Block until the exchange is over; every parameter's `grad` then holds the sum."""
        while self.advance():
            pass

    def settle(self, is_used: Callable[[Parameter], bool]) -> None:
        """Commit the step: the codec remembers what it has learned of parameters that any worker used."""
        used = [is_used(parameter) for parameter in self.parameters]
        self._codec.settle(used)
        if self.observer is not None and self._given is not None and self._came is not None:
            sizes, own = [local.numel() for local in self._locals], self._codec.own()
            given, came = self._given.split(sizes), self._came.split(sizes)
            places = [place for place, is_one in enumerate(used) if is_one]
            shares = {
                self.names[k]: WireShares(given[k], came[k], own.get(k, torch.zeros_like(given[k]))) for k in places
            }
            self._given = self._came = None
            self.observer.settled(shares, self._group)

    def drop(self) -> None:
        """Discard the step, or begin it anew."""
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None
        self._codec.drop()

    def own(self) -> dict[str, Tensor]:
        """Return this replica's error feedback by the parameters' names and in their shapes; not copied."""
        parts = self._codec.own()
        return {self.names[place]: _views(part, [self._locals[place]])[0] for place, part in parts.items()}

    def gathered_own(self) -> dict[str, list[Tensor]]:
        """Return the error feedback of all replicas, by their index; blocks."""
        sizes = [local.numel() for local in self._locals]
        held = torch.zeros(sum(sizes), dtype=torch.float32, device=self._flat.device)
        for place, part in self._codec.own().items():
            held.split(sizes)[place].copy_(part)
        rows = held.new_zeros(self._group.size, held.numel())
        self._group.begin_all_gather(held, rows, what=f"what is to be sent of {self._span}").wait()
        each = [_views(row, self._locals) for row in rows]
        return {name: [views[place] for views in each] for place, name in enumerate(self.names)}

    def common(self) -> dict[str, dict[str, Tensor]]:
        """Return what all replicas remember equally, by the parameters' names; not copied."""
        return {self.names[place]: dict(named) for place, named in self._codec.common().items()}

    def fill(self, own: Mapping[str, Tensor], common: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what buckets of the same parameters remembered, where it is known."""
        flats: dict[int, Tensor] = {}
        for place, (name, local) in enumerate(zip(self.names, self._locals, strict=True)):
            if name in own:
                flats[place] = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
                _views(flats[place], [local])[0].copy_(own[name])
        here = enumerate(self.names)
        self._codec.fill(flats, {place: common[name] for place, name in here if name in common})

    def metadata(self) -> list[float]:
        """Return the sums of the numbers that travelled along."""
        return self._flat[self._num_elements : self._num_sent].tolist()

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the bucket."""
        self._flat[: self._num_elements].mul_(factor)

    def _gradient(self, place: int) -> Tensor:
        """Return a parameter's gradient in the buffer: user code may have moved an earlier one elsewhere (`.data`)."""
        view, known = self._views[place], self._gradients[place]
        if known is view:
            return view.detach()
        if local_part(known).data_ptr() != view.data_ptr():
            self._gradients[place] = known = as_local_of(view, like=self.parameters[place])
        return known

    def _begin(self) -> None:
        """Copy the gradients in; from here on they are views of the buffer."""
        if self._transfer is not None:
            self._transfer.wait()  # of an abandoned gradient pass: others may still write to the buffer
        self.drop()
        for place, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.dtype != view.dtype:
                raise RuntimeError(
                    f"{self.names[place]} is {parameter.dtype}, but was {view.dtype} when it was prepared, and so are "
                    "its gradients: call model.to(dtype) before worker.prepare(model)"
                )
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                view.zero_().add_(parameter.grad)
            else:
                view.copy_(local_part(parameter.grad))
            parameter.grad = self._gradient(place)  # frees the gradient that autograd made
        if self.observer is not None and isinstance(self._codec, ErrorFeedback):
            self._given, self._came = self._flat[: self._num_elements].clone(), None
        if self._is_measured is not None and self._square is None:
            is_plain = self._flat.dtype in (torch.float32, torch.float64) and all(
                map(self._is_measured, self.parameters)
            )
            numbers = self._flat[: self._num_elements]
            self._square = torch.dot(numbers, numbers) if is_plain else self.square()  # while it is in the cache

    def _send(self, payload: Payload) -> None:
        tensor, size = payload.tensor, self._group.size
        self._num_rounds += 1
        self.waited_s = 0.0
        if isinstance(payload, SumPayload):
            self.bytes.num_sent += bytes_of_sum(tensor.nbytes, size)
            self._answer = tensor
            began = time.perf_counter()
            self._transfer = self._group.all_reduce(tensor, what=f"all_reduce of {self._span}")
            if (
                not self._group.shares_memory
            ):  # it takes no time, unless it is waited for at once (`comm/algorithm_selection.py`)
                self.waited_s = time.perf_counter() - began
        elif isinstance(payload, GatherPayload):
            self.bytes.num_sent += (size - 1) * tensor.nbytes
            self._answer = tensor.new_zeros(size, tensor.numel())
            what = f"all_gather of {self._span}"
            self._transfer = self._group.begin_all_gather(tensor, self._answer, what=what)
        else:
            self.bytes.num_sent += (size - 1) * tensor.nbytes // size
            self._answer = torch.zeros_like(tensor)
            what = f"all_to_all of {self._span}"
            self._transfer = self._group.begin_all_to_all(tensor, self._answer, what=what)


class LocalBucket:
    """The bucket of a group of one: gradients stay where autograd made them.

    If there were other replicas before, this worker's remaining error feedback is added in its first step.
    """

    may_send_more = can_carry_metadata = False
    encoding_s = waited_s = 0.0

    def __init__(self, parameters: Sequence[NamedParameter]) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.bytes = SentBytes()
        self._own: dict[str, Tensor] = {}
        self._is_measured: Callable[[Parameter], bool] | None = None

    def begin(self, *, is_measured: Callable[[Parameter], bool] | None) -> None:
        self._is_measured = is_measured

    def square(self) -> Tensor:
        return square_of(filter(self._is_measured, self.parameters), device=self.parameters[0].device)

    def depart(self, metadata: Sequence[float] = (), *, seed: int = 0) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            if parameter.grad is not None and name in self._own:
                local_part(parameter.grad).add_(self._own[name])

    def advance(self) -> bool:
        return False

    def land(self) -> None:
        return

    def settle(self, is_used: Callable[[Parameter], bool]) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if is_used(parameter):
                self._own.pop(name, None)

    def drop(self) -> None:
        return

    def own(self) -> dict[str, Tensor]:
        return self._own

    def gathered_own(self) -> dict[str, list[Tensor]]:
        return {name: [held.clone()] for name, held in self._own.items()}

    def common(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def fill(self, own: Mapping[str, Tensor], common: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._own = {name: own[name].clone() for name in self.names if name in own}

    def metadata(self) -> list[float]:
        return []

    def scale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)


def bytes_of_sum(num_bytes: int, size: int) -> int:
    """Return what each worker sends at least when `num_bytes` are summed, by any algorithm."""
    return 2 * (size - 1) * num_bytes // size


def _rows_and_columns(tensor: Tensor) -> tuple[int, int]:
    """Return a parameter's shape as a matrix, in the order of its memory; with fewer than two dims, a column."""
    sizes = tensor.size()
    if tensor.dim() < 2 or not tensor.numel():
        return tensor.numel(), 1
    if _is_dense(tensor):  # the outermost dim first
        sizes = [size for _, size in sorted(zip(tensor.stride(), sizes, strict=True), reverse=True)]
    return sizes[0], tensor.numel() // sizes[0]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return one view per parameter with the parameter's own strides, as optimizers prefer."""
    views: list[Tensor] = []
    offset = 0
    for parameter in parameters:
        count = parameter.numel()
        if _is_dense(parameter):
            views.append(flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset))
        else:
            views.append(flat[offset : offset + count].view(parameter.size()))
        offset += count
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the strides cover numel() elements without holes or overlap, in some order of dims."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[-1]} .. {names[0]} ({len(names)} gradients)"
