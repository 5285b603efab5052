"""What a step's micro-batches have written to one buffer, by the buffer's rule; the mean is in `tracked_buffer`.

Each rule has a share, a 1-D tensor of double precision that is summed over all workers, and what the sum makes of the
value at the step's beginning. Integers travel as two numbers each, so that sums are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.step.buffer_queue import QueueForm, merged_queue, written_rows

__all__ = [
    "LOW_BITS",
    "BufferSpec",
    "FirstCapture",
    "QueueCapture",
    "SumCapture",
    "first_index",
    "is_integer",
    "widened",
    "zeros",
]

LOW_BITS = 32  # a 64-bit integer is sent as two numbers: 2^32 high + low


@dataclasses.dataclass(frozen=True, slots=True)
class BufferSpec:
    """Shape, dtype and device of a buffer."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class SumCapture:
    """What each micro-batch added."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, value: Tensor, start: Tensor, micro: MicroBatch | None) -> None:
        """A micro-batch has written this value."""
        added = widened(value) - widened(start)
        self._sum = added if self._sum is None else self._sum + added

    def share(self, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """This worker's part."""
        return zeros(spec) if self._sum is None else self._sum

    def combined(self, total: Tensor, start: Tensor, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """The value after the step."""
        if is_integer(spec.dtype):
            return (start.reshape(-1).long() + _whole(total)).to(spec.dtype).view(spec.shape)
        return _narrowed(widened(start) + total, spec)


class FirstCapture:
    """What the first of the micro-batches wrote that are combined."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._index = -1  # of the micro-batch that wrote it

    def add(self, value: Tensor, start: Tensor, micro: MicroBatch | None) -> None:
        """A micro-batch has written this value."""
        index = 0 if micro is None else micro.index
        if self._value is None or index < self._index:
            self._value, self._index = (
                widened(value).clone(),
                index,
            )  # of double precision it would be the buffer itself

    def has_written(self, index: int) -> bool:
        """Whether the micro-batch of this index, before which there is none, wrote here."""
        return self._value is not None and self._index == index

    def share(self, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """This worker's part."""
        return self._value if self._value is not None and self.has_written(first_index(micros)) else zeros(spec)

    def combined(self, total: Tensor, start: Tensor, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """The value after the step."""
        return _exact(total, spec)


class QueueCapture:
    """The rows that each micro-batch brought."""

    def __init__(self, form: QueueForm, full_name: str, pointer: Callable[[], Tensor | None]) -> None:
        """`pointer()`: its value at the step's beginning."""
        self.form, self._full_name, self._pointer = form, full_name, pointer
        self._rows: dict[int, Tensor] = {}  # by the index of the micro-batch

    def num_rows(self, micro: MicroBatch) -> int:
        """How many rows a micro-batch brings."""
        return self.form.rows * (micro.num_samples if self.form.is_per_sample else 1)

    def add(self, value: Tensor, start: Tensor, micro: MicroBatch | None) -> None:
        """A micro-batch has written this value."""
        if micro is None:
            raise ValueError(
                f"buffer {self._full_name} is a queue, and replicas that take steps alone cannot share one"
            )
        self._rows[micro.index] = written_rows(self.form, value, self.num_rows(micro), self._pointer())

    def share(self, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """This worker's part: its own rows in their places, and zeros for those of others."""
        others = [_empty_rows(spec, self.form.dim, self.num_rows(micro)) for micro in micros]
        blocks = [self._rows.get(micro.index, other) for micro, other in zip(micros, others, strict=True)]
        return widened(torch.cat(blocks))

    def combined(self, total: Tensor, start: Tensor, spec: BufferSpec, micros: Sequence[MicroBatch]) -> Tensor:
        """The value after the step."""
        counts = [self.num_rows(micro) for micro in micros]
        rows = _empty_rows(spec, self.form.dim, sum(counts))
        flat = _exact(total, BufferSpec(rows.shape, spec.dtype, spec.device))
        return merged_queue(self.form, start, flat.split(counts), self._pointer())

    def require_all(self, num_here: int) -> None:
        """Raise ValueError unless each micro-batch of this worker, of which there are so many, has brought its rows."""
        if len(self._rows) != num_here:
            raise ValueError(
                f"buffer {self._full_name} is a queue, and {len(self._rows)} of {num_here} micro-batches of this "
                "worker wrote to it in this step: all must, or none. Write to it in every forward, with the same "
                "number of rows for each sample"
            )


def first_index(micros: Sequence[MicroBatch]) -> int:
    """The index of the first of these micro-batches, of which some worker has run it; of a whole step, where none are
    given."""
    return micros[0].index if micros else 0


def widened(value: Tensor) -> Tensor:
    """The numbers of a tensor in float64, 1-D, so that weighted sums are exact, or nearly so."""
    flat = value.detach().reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat.to(torch.complex128)).reshape(-1)
    if flat.is_floating_point():
        return flat.double()
    high = flat.long() >> LOW_BITS
    return torch.cat([high, flat.long() - (high << LOW_BITS)]).double()


def zeros(spec: BufferSpec) -> Tensor:
    """The share of a worker that has nothing to add."""
    return torch.zeros_like(widened(torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)))


def _empty_rows(spec: BufferSpec, dim: int, num: int) -> Tensor:
    """So many empty rows of a queue along `dim`."""
    rest = [size for place, size in enumerate(spec.shape) if place != dim]
    return torch.zeros([num, *rest], dtype=spec.dtype, device=spec.device)


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _whole(total: Tensor) -> Tensor:
    high, low = total.chunk(2)
    return (high.long() << LOW_BITS) + low.long()


def _exact(total: Tensor, spec: BufferSpec) -> Tensor:
    """What one worker alone has put into a sum."""
    if is_integer(spec.dtype):
        return _whole(total).to(spec.dtype).view(spec.shape)
    return _narrowed(total, spec)


def _narrowed(total: Tensor, spec: BufferSpec) -> Tensor:
    if spec.dtype.is_complex:
        total = torch.view_as_complex(total.view(-1, 2))
    return total.to(spec.dtype).view(spec.shape)
