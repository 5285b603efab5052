"""Takes a flat loop over micro-batches as passes over steps: `backward` and `optimizer.step()` are in its body.

A step of Paceline is a pass over this worker's micro-batches of a global batch, and then the optimizer's step. A loop
of Accelerate has one body for both. So each micro-batch that a loader gives opens the next part of the pass, before the
model's forward. `backward` of the last one ends the pass: gradients are averaged over all workers there, and a later
`optimizer.step()` takes them. In the other micro-batches it does nothing, as inside `accumulate`.

A pass may begin again, because a step ran out of memory: then the loader gives its micro-batches again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.parallel.precision import input_dtype
from paceline.plan import Batch
from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.data import random_state
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.step_batch import StepBatch, to_device
from paceline.worker.run_member import parts_of
from paceline.worker.stateful_member import loop_of
from paceline.worker.worker import Worker

__all__ = ["FlatLoop", "NotTraining", "StepShape"]

TWICE = (
    "accelerator.backward() was called twice for one batch: add the losses and call it once. With two optimizers that "
    "step in turn (a GAN), use worker.stepper for each: docs/how-to/come-from-accelerate.md"
)
OUTSIDE = (
    "accelerator.backward() was called outside of a loop over a prepared DataLoader that trains. A loop over a loader "
    "trains where gradients are on and a prepared model is in train mode: call model.train() before it, and pass the "
    "DataLoader to accelerator.prepare(). A loop whose first batches get no backward evaluates: leave batches out with "
    "accelerator.skip_first_batches(loader, n). A loop that was left (break, next(iter(loader))) has taken back the "
    "step under way: call backward inside of it"
)


class NotTraining(Exception):
    """A loop asks for the next batch, and has called no `backward` for the batches of the first step: it evaluates."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How samples make a step: `slots` slots (accumulated) of `slot` samples (all processes), in batches of `micro`."""

    micro: int
    slot: int
    slots: int

    @property
    def size(self) -> int:
        """Samples of a full step."""
        return self.slot * self.slots

    def weight(self, batch: StepBatch, micro: MicroBatch) -> float | None:
        """How much a micro-batch counts, in samples of a full slot; None: as many as it has.

        Within a slot samples count alike, and slots count alike, as in one process that adds up the slots' means.
        """
        if batch.num_samples == self.size or self.slots == 1:
            return None
        first = batch.start + (micro.start - batch.start) // self.slot * self.slot
        return micro.num_samples * self.slot / min(self.slot, batch.stop - first)

    def factor(self, batch: StepBatch) -> float:
        """What the gradient of a step is multiplied with: the mean is over all slots, also those that are not there."""
        return -(-batch.num_samples // self.slot) / self.slots


class FlatLoop:
    """The training loop of one program on one worker: at most one loader trains at a time."""

    def __init__(self, worker: Worker) -> None:
        parts = parts_of(worker)
        self.handed = (0, 0)  # of the batch that a loader gave last: rows, and how many of them are not repeated
        self.follows_sync = False  # the program asks when its optimizer is to step, and does not count by itself
        self.seed = 0
        self._worker, self._loop, self._executor, self._parts = worker, loop_of(worker), parts.executor, parts
        self._batches: Iterator[StepBatch] | None = None
        self._batch: StepBatch | None = None
        self._pass: Iterator[Any] | None = None  # None: not begun, or at its end
        self._shape = StepShape(micro=1, slot=1, slots=1)
        self._num_given = self._num_opened = self._num_backward = 0
        self._is_done = self._has_ended = False
        self._trains = False  # there was a backward since the loader was opened
        self._again: list[Any] = []  # the first micro-batch of a pass that begins again
        self._carried: list[tuple[Parameter, Tensor]] = []  # gradients that no zero_grad() has removed
        self._num_steps = 0  # calls of optimizer.step() since the batch was handed out
        self._num_loops = 0  # that were opened
        self.in_loop = False  # a loop that trains was opened, and has not been left
        self._is_as_landed = False  # nothing has changed the averaged gradients
        self._is_read_to_end = False  # the loader has no more data, and the last step's pass is under way

    def leave_unused(self) -> None:
        """Another loop begins: leave one that was read to its end without a backward."""
        if self._is_read_to_end and self._num_backward == 0:
            self.close()

    # What the accelerator asks.

    @property
    def in_pass(self) -> bool:
        """Whether gradients are being made: an optimizer must not step now."""
        return self._batch is not None and not self._has_ended

    @property
    def is_sync(self) -> bool:
        """Whether the present micro-batch is the last of its step, or no loop trains."""
        return not self.in_pass or (self._batch is not None and self._num_opened >= self._batch.num_runs)

    @property
    def was_skipped(self) -> bool:
        """Whether the last step was not taken, because its gradients were not finite."""
        outcome = self._executor.outcome
        return outcome is not None and not outcome.is_taken

    @property
    def is_stopped(self) -> bool:
        """Whether the run has come to its last step (max_steps)."""
        return self._loop.between.is_stopped

    def known_norm(self, parameters: Sequence[Tensor]) -> float | None:
        """The norm of these parameters' gradients, where the pass has computed it; asked for once."""
        is_as_landed, self._is_as_landed = self._is_as_landed, False
        return self._loop.known_norm(parameters) if is_as_landed else None

    # The loader.

    def open(self, source: StreamSource, shape: StepShape, *, begin: tuple[int, int] | None, seed: int) -> int:
        """Begin a loop over a loader's data, from this epoch and position on; None: from where the stream stands.

        Returns the loop's number, with which it is left.
        """
        self.close()
        self._shape, self.seed, self._trains = shape, seed, False
        parts = self._parts
        batch = Batch(size=shape.size, micro=shape.micro, shuffle=False, seed=parts.plan.batch.seed)
        parts.sizes.adopt(batch, is_even=False)
        parts.collectives.begin_steps(keeps=parts.memory_checkpointer.is_on)
        self._batches = self._loop.open(source, timeout_s=parts.timeout_s)
        if begin is not None:
            cursor = self._loop.streams[source.name].cursor
            cursor.epoch, cursor.position = begin
        self._num_loops, self.in_loop = self._num_loops + 1, True
        return self._num_loops

    def leave(self, number: int, *, is_at_end: bool) -> None:
        """The loop of this number asks for no more batches; if it is not at the end of its data, a pass that is under
        way is closed. A loop that another has taken the place of changes nothing."""
        if number != self._num_loops:
            return
        self.in_loop = False
        if self.in_pass and not is_at_end:
            self.close()

    def close(self) -> None:
        """Leave the loop: a pass that is under way changes nothing, and its step was not taken."""
        is_open = self._pass is not None
        if self._is_read_to_end and self._has_ended and self._batches is not None:
            self._settle()
            next(self._batches, None)  # there is none; what is due after the last step is done
        self._is_read_to_end = False
        for one in (self._pass, self._batches):
            if one is not None:
                one.close()  # pyright: ignore[reportAttributeAccessIssue]  # generators
        if is_open:
            self._carried.clear()
        self._pass = self._batches = self._batch = None
        self._again.clear()

    def next_data(self) -> Any:
        """The next micro-batch, on the device. Raises StopIteration at the end of the data, and NotTraining."""
        batch = self._batch
        if self._again:
            self._num_given = 1
            return self._give(self._again.pop(), 0)
        if batch is not None and not self._has_ended and self._num_given >= batch.num_runs:
            if not self._trains and self._num_backward == 0:
                raise NotTraining
            if batch.ends_epoch:  # a loop that reads ahead comes to the end of the data before its last backward
                self._is_read_to_end = True
                raise StopIteration
            self._skip_rest()
        if batch is None or self._has_ended:
            batch = self._advance()
        number = self._num_given
        self._num_given += 1
        if number == self._num_opened and (number == 0 or self._is_done):
            return self._give(self._open_next(), number)
        with random_state.PreservedRandomState():  # read ahead, inside another micro-batch
            data = batch.read(max(0, min(number, len(batch.micros) - 1)))
        return self._give(
            to_device(data, self._worker.device, input_dtype(self._worker.plan.compute.precision)), number
        )

    def _give(self, data: Any, number: int) -> Any:
        batch = self._of_step()
        micro = self._micro(number)
        self.handed = micro.num_samples, 0 if number >= len(batch.micros) else micro.num_samples
        return data

    def _advance(self) -> StepBatch:
        """Go on to the next step; returns its batch. Raises StopIteration where there is none."""
        self._settle()
        batches = self._batches
        if batches is None:
            raise StopIteration
        while True:
            self._batch = batch = next(batches)
            self._num_given = self._num_opened = self._num_backward = self._num_steps = 0
            self._is_done = self._has_ended = False
            if batch.num_runs:
                return batch
            for _ in batch:  # a replica that takes steps by itself, and has no samples in this one
                pass
            self._loop.commit(batch)
            self._batch = None

    def _settle(self) -> None:
        """The loop goes on to another step: this one counts, also where no optimizer has stepped."""
        batch = self._batch
        if batch is None:
            return
        self._refuse_uneven(batch)
        if not self._loop.step_log.is_committed(batch.stream):
            self._loop.commit(batch)
        self._batch = None

    def _set_aside(self) -> None:
        """A pass removes the gradients that are there: keep what no zero_grad() has removed, for its end."""
        self._carried = [
            (parameter, parameter.grad)
            for optimizer in self._parts.prepared.own_optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, _ in self._carried:
            parameter.grad = None

    def _refuse_uneven(self, batch: StepBatch) -> None:
        """Raise RuntimeError where a program accumulates by itself, and this worker runs batches of several processes.

        It counts batches, and there are more of them here than in each process of its world.
        """
        if batch.num_runs > self._shape.slots and not self.follows_sync and 0 < self._num_steps < batch.num_runs:
            raise RuntimeError(
                f"optimizer.step() was called for {self._num_steps} of the {batch.num_runs} batches of step "
                f"{batch.step}, and this worker runs {batch.num_runs} where each process of the program's world has "
                f"{self._shape.slots}: a program that counts batches itself needs a worker for each process. Use "
                "accelerator.accumulate(model), or PACELINE_PROCESSES as large as the number of workers"
            )

    # The pass.

    def follow(self, model: nn.Module) -> None:
        """Have a prepared model's forward open the next micro-batch, where the loop has read ahead."""

        def before(module: nn.Module, args: Any) -> None:  # a function: a copy of the model is to copy no loop
            is_due = self.in_pass and self._is_done and self._num_opened < self._num_given
            if module is model and is_due and torch.is_grad_enabled():
                self._open_next()

        model.register_forward_pre_hook(before)

    def backward(self, loss: Tensor) -> None:
        """Add the micro-batch's gradient; after the last one of a step they are averaged over all workers."""
        batch = self._batch
        if batch is None:
            raise RuntimeError(OUTSIDE)
        if self._has_ended:
            raise RuntimeError(TWICE)
        if self._is_done and self._num_opened < self._num_given:
            self._open_next()
        self._executor.backward(self._weighed(batch, loss))
        self._num_backward += 1
        self._is_done = self._trains = True
        if self._num_opened == batch.num_runs:
            self._end_pass()

    def _weighed(self, batch: StepBatch, loss: Tensor) -> Any:
        if self._num_opened > len(batch.micros):
            return loss  # void
        weight = self._shape.weight(batch, self._micro(self._num_opened - 1))
        return loss if weight is None else (loss * weight, weight)

    def _open_next(self) -> Any:
        """Open the next micro-batch of the pass, with a random state of its own; returns its data."""
        batch = self._of_step()
        if self._pass is None:
            self._set_aside()
            self._pass = iter(batch)
        data = next(self._pass)
        self._opened(1 + self._num_opened)
        return data

    def _opened(self, number: int) -> None:
        batch = self._of_step()
        self._num_opened, self._is_done = number, False
        random_state.seed_all(self.seed, 5, batch.step, self._micro(number - 1).index)

    def _end_pass(self) -> None:
        """Average the gradients, where the pass is at its end."""
        ended: Any = object()
        data = next(self._pass, ended) if self._pass is not None else ended
        if data is not ended:  # the pass begins again
            self._num_given = self._num_backward = 0
            self._again.append(data)
            self._opened(1)
            return
        self._pass, self._has_ended = None, True
        carried, self._carried = self._carried, []
        factor = self._shape.factor(self._of_step())
        self._loop.add_gradients(carried, factor=factor)
        self._is_as_landed = not carried and factor == 1.0

    def _skip_rest(self) -> None:
        """End a pass in which the loop has left out the backward of some micro-batches."""
        while not self._has_ended:
            if self._num_opened < self._of_step().num_runs:
                self._open_next()
            else:
                self._end_pass()
        self._again.clear()

    def _of_step(self) -> StepBatch:
        if self._batch is None:
            raise RuntimeError(OUTSIDE)
        return self._batch

    def _micro(self, number: int) -> MicroBatch:
        """The micro-batch of a run: of a void one, which it repeats."""
        batch = self._of_step()
        if batch.micros:
            return batch.micros[min(number, len(batch.micros) - 1)]
        return batch.spare or MicroBatch(0, batch.start, batch.stop)

    # The optimizers.

    def note_step(self) -> bool:
        """An optimizer's `step()` was called; returns whether it is to step."""
        self._num_steps += 1
        self._is_as_landed = False
        return not self.in_pass

    def zero_grad(self, optimizer: Optimizer) -> bool:
        """An optimizer's `zero_grad()` was called; returns whether its gradients are to be removed now.

        Inside of a pass what is left of earlier steps is removed. Gradients of the step under way stay: they belong to
        it.
        """
        if not self.in_pass:
            return True
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._carried = [(one, gradient) for one, gradient in self._carried if id(one) not in own]
        return False
