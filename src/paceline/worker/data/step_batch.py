"""`StepBatch`, what `worker.batches` yields: this worker's micro-batches of one step's global batch."""

from __future__ import annotations

import dataclasses
import dis
import inspect
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data import random_state

__all__ = ["StepBatch", "to_device"]


class StepBatch:
    """This worker's micro-batches of one step. `step(batch)` takes it; iterating over it is the plain loop.

    `step` is the number that the step gets when it is committed. `ends_epoch` says whether it is the last of its epoch
    (None: unknown for an iterable dataset). `num_samples` counts the real samples of the whole global batch. `num_here`
    counts those that the step's mean is over: all, or this replica's share where replicas take steps by themselves.
    `len()` counts the micro-batches of this worker, which may be none. It can be iterated again (for a second
    optimizer): the data is kept.

    If a replica is split over several workers, all of them run the same number of micro-batches. A loop may then have
    void ones at its end, which are run for the other workers and count for nothing; `is_void` is true meanwhile.

    Raises TypeError for `x, y = batch`, and RuntimeError if it is read after the loop has taken the next batch.

    Example::

        for batch in worker.batches(dataset):
            for x, y in batch:  # on the worker's device
                worker.backward(torch.nn.functional.mse_loss(model(x), y))
            optim.step()
            optim.zero_grad()
    """

    def __init__(
        self,
        *,
        stream: str,
        step: int,
        epoch: int,
        start: int,
        stop: int,
        micros: Sequence[MicroBatch],
        ends_epoch: bool | None,
        fetch: Callable[[], Any],
        run_pass: Callable[[StepBatch], Iterator[Any]],
        num_runs: int | None = None,
        spare: MicroBatch | None = None,
        num_here: int | None = None,
        shares: Mapping[int, tuple[MicroBatch, ...]] | None = None,
    ) -> None:
        self.stream, self.step, self.epoch = stream, step, epoch
        self.start, self.stop, self.ends_epoch = start, stop, ends_epoch
        self.micros = tuple(micros)
        self.num_samples = stop - start
        self.num_here = self.num_samples if num_here is None else num_here
        self.num_runs = len(self.micros) if num_runs is None else num_runs  # in a pass; beyond the micro-batches: void
        self.spare = spare  # what void runs use where this worker has no micro-batch
        self.shares = shares or {}  # each replica's share, where replicas step alone or late ones are left out
        self.chosen: tuple[int, ...] | None = None  # of these shares those that count, once known; None: all
        self.behind: int | None = None  # staleness: updates that the weights did not have; None: not known
        self.is_void = False  # the present micro-batch
        self.num_passes = 0
        self.serial = 0  # its number among all batches of this worker; set by the worker
        self.data_s = 0.0  # waited for data
        self._fetch, self._run_pass = fetch, run_pass
        self._kept: list[Any] = []

    @property
    def dropped(self) -> tuple[MicroBatch, ...]:
        """The micro-batches that came too late for the step, and do not count."""
        if self.chosen is None:
            return ()
        return tuple(micro for share, micros in self.shares.items() if share not in self.chosen for micro in micros)

    def __len__(self) -> int:
        return len(self.micros)

    def __iter__(self) -> Iterator[Any]:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None and _is_unpacked(frame.f_back):
            raise TypeError(
                "an item of worker.batches() is one step: this worker's micro-batches of it, not one pair. In place of "
                "`x, y = batch` write `loss = step(batch)`, or `for x, y in batch: worker.backward(loss(model(x), y))`"
            )
        return self._run_pass(self)

    def __repr__(self) -> str:
        return f"<step {self.step}, epoch {self.epoch}: {len(self)} micro-batches here of {self.num_samples} samples>"

    def runs(self) -> Iterator[tuple[int, MicroBatch, bool]]:
        """What a pass runs: the number to `read`, the micro-batch, and whether it is void."""
        for number, micro in enumerate(self.micros):
            yield number, micro, False
        last = self.micros[-1] if self.micros else self.spare
        for _ in range(len(self.micros), self.num_runs if last is not None else 0):
            yield max(0, len(self.micros) - 1), cast("MicroBatch", last), True

    def read(self, number: int) -> Any:
        """Return the data of this worker's micro-batch `number`, on the CPU; the first time it waits for the loader."""
        while len(self._kept) <= number:
            began = time.perf_counter()
            self._kept.append(self._fetch())
            self.data_s += time.perf_counter() - began
        return self._kept[number]

    def part(
        self,
        micros: Sequence[MicroBatch],
        *,
        num_runs: int,
        spare: MicroBatch | None,
        num_here: int,
        fetch: Callable[[], Any],
    ) -> StepBatch:
        """Return more micro-batches of the same step, for a pass of their own; `fetch` reads their data."""
        part = StepBatch(
            stream=self.stream,
            step=self.step,
            epoch=self.epoch,
            start=self.start,
            stop=self.stop,
            micros=micros,
            ends_epoch=self.ends_epoch,
            fetch=fetch,
            run_pass=self._run_pass,
            num_runs=num_runs,
            spare=spare,
            num_here=num_here,
        )
        part.serial = self.serial
        return part

    def reassign(
        self,
        fetch: Callable[[], Any],
        *,
        micros: Sequence[MicroBatch],
        num_runs: int,
        spare: MicroBatch | None,
        num_here: int | None = None,
        shares: Mapping[int, tuple[MicroBatch, ...]] | None = None,
    ) -> None:
        """Begin again with another share; `fetch` reads its data."""
        self.micros, self._fetch = tuple(micros), fetch
        self.num_runs, self.spare = num_runs, spare
        self.num_here = self.num_samples if num_here is None else num_here
        self.shares = shares or {}
        self._kept.clear()

    def drain(self) -> None:
        """Read the rest of this step from the loader, so that the next step gets its own data."""
        num_reads = len(self.micros) or (self.spare is not None)
        if len(self._kept) < num_reads:
            with random_state.PreservedRandomState():
                self.read(num_reads - 1)

    def let_go(self) -> None:
        """The loop has gone on: drop the data. Local rounds keep their batches, and may be long."""
        self._kept.clear()
        self._fetch = _no_batches_left


def _no_batches_left() -> Any:
    raise RuntimeError("the data of a batch was read after the loop had gone on to the next one")


def to_device(data: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move all tensors in a tree of dicts, lists, tuples and dataclasses to `device`, floats to `dtype` if given."""
    if isinstance(data, Tensor):
        target = dtype if data.is_floating_point() else None
        if data.device == device and (target is None or data.dtype == target):
            return data
        return data.to(device=device, dtype=target, non_blocking=True)
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, dtype) for key, value in data.items()}
        return moved if type(data) is dict else _rebuilt(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device, dtype) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(value, device, dtype) for value in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: to_device(getattr(data, f.name), device, dtype) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **fields)
    own_to = getattr(data, "to", None)  # batch classes of other libraries (tokenizers, graphs)
    return own_to(device) if callable(own_to) else data


def _rebuilt(original: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """A mapping of the original's class, where that can be made from a dict."""
    try:
        return type(original)(moved)  # type: ignore[call-arg]  # tried: of a class that does not take a dict the next line is for
    except TypeError:
        return moved


UNPACKS = frozenset(dis.opmap[name] for name in ("UNPACK_SEQUENCE", "UNPACK_EX"))


def _is_unpacked(frame: types.FrameType) -> bool:
    """Whether a frame is at an assignment to several names, `x, y = ...`, which also calls `iter`."""
    code, offset = frame.f_code.co_code, frame.f_lasti
    return 0 <= offset < len(code) and code[offset] in UNPACKS
