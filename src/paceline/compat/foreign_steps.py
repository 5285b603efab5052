"""The run's own steps, taken from a loop that is a program's: each forward and backward is a micro-batch of a step.

The program reads its own data. To the run its samples are numbers in order, of which each worker gets as many in a step
as the plan's batch says. What a step is stays the same: each micro-batch has its own random state, gradients are
averaged over the whole batch, all workers agree, and take the step or leave it out together.

A step's micro-batches are a generator of the loop (`StepExecutor.run`). It is held open between the program's calls:
`open_micro` asks it for the next one, and `finish` for its end, where the workers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

from paceline.parallel.precision import computing, input_dtype
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.step_batch import StepBatch, to_device
from paceline.worker.run_member import parts_of
from paceline.worker.stateful_member import loop_of
from paceline.worker.step.step_outcome import StepOutcome
from paceline.worker.worker import Worker

__all__ = ["ForeignSteps", "StepEnd", "before_forwards", "open_batches"]

NUMBERS = 1 << 48  # samples of the endless stream: more than any run takes


class _Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class StepEnd(NamedTuple):
    """What came of a step."""

    is_taken: bool
    norm: Tensor | None  # of its gradients, before they were clipped; None: not known


def open_batches(
    worker: Worker,
    read: Callable[[list[int]], Any] | None = None,
    *,
    name: str = "train",
    sizes: MicroBatchSize | None = None,
) -> Iterator[StepBatch]:
    """Open an endless stream of batches, the plan's or of these sizes. `read(numbers)` gives the data of a micro-batch
    when it is asked for; None: the program has it. An operation of all workers."""
    parts, loop = parts_of(worker), loop_of(worker)
    parts.collectives.begin_steps(keeps=parts.memory_checkpointer.is_on)
    source = StreamSource(
        dataset=_Numbers(),
        epochs=1,
        collate=read or _nothing,
        loaders=0,
        prefetch=1,
        pin=False,
        name=name,
        is_endless=True,
    )
    return loop.open(source, timeout_s=parts.timeout_s, sizes=sizes)


class ForeignSteps:
    """Takes a worker's steps, one micro-batch after the other, as a program calls for them."""

    def __init__(self, worker: Worker, *, name: str = "train") -> None:
        self._worker, self._name = worker, name
        self._loop, self._precision = loop_of(worker), parts_of(worker).plan.compute.precision
        self._batches: Iterator[StepBatch] | None = None  # opened with the first micro-batch
        self._batch: StepBatch | None = None
        self._pass: Iterator[Any] | None = None
        self._num_opened = 0  # micro-batches of the batch
        self.is_open = False  # a micro-batch is: its backward has not come
        self.is_backward = False  # the run's own backward is under way

    @property
    def has_begun(self) -> bool:
        """Whether a first micro-batch was opened: from then on nothing can be restored."""
        return self._batches is not None

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun, and is not taken."""
        return self._pass is not None

    @property
    def is_at_end(self) -> bool:
        """Whether the step has all micro-batches of this worker."""
        return self._batch is not None and self._num_opened == self._batch.num_runs

    def move(self, data: Any) -> Any:
        """Return a program's data on the worker's device, in the precision's own type."""
        return to_device(data, self._worker.device, input_dtype(self._precision))

    def computing(self) -> Any:
        """What surrounds a forward outside of a step: the plan's precision."""
        return computing(self._precision, self._worker.device)

    def open_micro(self) -> None:
        """Begin the next micro-batch of this worker, before its forward; nothing while one is open.

        Raises RuntimeError where the step has all of its micro-batches, and SystemExit(0) at the run's last step.
        """
        if self.is_open:
            return
        if self.is_at_end:
            raise RuntimeError(
                f"the step has its {self._num_opened} micro-batches on this worker, and was not taken: call the "
                "engine's step() after each backward()"
            )
        if self._batches is None:
            self._batches = open_batches(self._worker, name=self._name)
        if self._batch is None:
            self._next_batch()
        if self._batch is not None and self._pass is None:
            self._pass = iter(self._batch)
        if self._pass is not None:
            next(self._pass)
            self.is_open, self._num_opened = True, self._num_opened + 1

    def backward(self, loss: Any) -> None:
        """Add the gradient of the open micro-batch. `loss` is its mean, or (sum, count)."""
        if not self.is_open:
            raise RuntimeError(
                "backward() came twice for one forward, or for a loss of another model: a micro-batch has one "
                "forward of the engine's model, and one backward. Add its losses, and call backward() once"
            )
        self.is_backward = True
        try:
            self._worker.backward(loss)
        finally:
            self.is_backward = False
        self.is_open = False

    def end_micro(self) -> None:
        """End the open micro-batch. Raises RuntimeError where it had no backward."""
        if self.is_open or not self.is_under_way:
            raise RuntimeError("engine.step() comes after engine.backward(loss), once for each micro-batch")

    def finish(self, optimizer: Optimizer, max_norm: float | None) -> StepEnd:
        """Agree with the other workers on the gradients, clip them, and step the optimizer where all take the step.

        It belongs after the last micro-batch. Raises RuntimeError where micro-batches are missing, and SyncError where
        a worker is lost.
        """
        outcome = self._close_pass()
        norm = None if outcome.grad_norm is None else torch.tensor(outcome.grad_norm)
        if outcome.is_taken and max_norm is not None:
            norm = self._worker.clip_gradients(max_norm)
        if outcome.is_taken:
            optimizer.step()  # which commits the step
        optimizer.zero_grad(set_to_none=True)
        return StepEnd(outcome.is_taken, norm)

    def _close_pass(self) -> StepOutcome:
        if self._pass is None or not self.is_at_end:
            raise RuntimeError("a step ends after the backward of its last micro-batch")
        try:
            next(self._pass)
        except StopIteration:
            pass
        else:
            raise RuntimeError("a micro-batch came again in a program's loop: its data are the program's, and gone")
        self._pass = None
        outcome = self._loop.executor.outcome
        if outcome is None:
            raise RuntimeError("the step was left early")
        return outcome

    def advance(self) -> None:
        """End the step: it is reported, and saved where that is due. Raises SystemExit(0) at the run's last step."""
        self._num_opened = 0
        self._next_batch()

    def _next_batch(self) -> None:
        self._batch = None
        if self._batches is None:
            return
        self._batch = next(self._batches, None)
        if self._batch is None:
            raise SystemExit(0)  # max_steps: an end like any other

    def close(self) -> None:
        """Leave the steps: what was not taken did not happen."""
        if self._batches is not None and hasattr(self._batches, "close"):
            cast("Generator[StepBatch]", self._batches).close()
        self._batch = self._pass = None
        self.is_open = False


def before_forwards(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call something before each forward of a model that trains, from wherever it is called, until the hook is
    removed."""

    def before(module: nn.Module, args: Any) -> None:
        if module.training and is_grad_enabled():
            call()

    return model.register_forward_pre_hook(before, prepend=True)


def _nothing(numbers: list[int]) -> None:
    """The program reads the data of these samples."""
