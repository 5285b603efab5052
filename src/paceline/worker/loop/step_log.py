"""The step log: which batches are under way, which are committed, and what is reported of them.

A stream has one batch under way at a time; several streams may be interleaved. A step gets its number when a gradient
pass over its batch begins. It is committed by the optimizer's step, and reported (as StepDone) when the loop asks for
the stream's next batch, or before the next step is committed: numbers and events are in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.events import Note, Reported, StepDone, Warned
from paceline.sync.allreduce.buckets import SentBytes
from paceline.units import name_text
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.loop.data_pace import DataPace
from paceline.worker.loop.learning_rates import LearningRates
from paceline.worker.parts import WorkerParts
from paceline.worker.step.loss_scale import LEAST, scale_text
from paceline.worker.step.step_outcome import StepOutcome

__all__ = ["PendingStep", "StepLog"]

NAMED_AT_MOST = 8
SKIPS_REPORTED, SKIPS_ALLOWED = 3, 100  # steps in a row without finite gradients
SKIPS_AT_LEAST_SCALE = 20  # in fp16, where the loss scale cannot be lowered any more


class PendingStep:
    """What is known of a batch that is under way."""

    def __init__(self, batch: StepBatch, cursor: StreamPosition) -> None:
        self.batch, self.cursor = batch, cursor
        self.outcome: StepOutcome | None = None  # of the first gradient pass that called backward
        self.metrics: dict[str, Tensor | float] = {}
        self.rates: dict[str, Tensor | float] = {}  # learning rates, with which it was taken
        self.is_committed = self.is_reported = False
        self.compute_s = self.communication_s = self.optimizer_s = 0.0
        self.agreed_at = time.perf_counter()

    @property
    def is_skipped(self) -> bool:
        return self.outcome is None or not (self.outcome.is_taken or self.outcome.is_idle or self.outcome.is_late)


class StepLog:
    """Keeps count for one worker. `num_bytes_sent()` went to others so far, `wire_bytes()` of it to other replicas."""

    def __init__(self, parts: WorkerParts, *, stepped: Callable[[StepBatch, bool], None]) -> None:
        """`stepped(batch, is_again)` is called in the commit of each step; with `is_again` where another optimizer has
        stepped on a batch that was committed before."""
        place = parts.scope.place
        self.step = 0  # committed steps, of all attempts
        self.latest: PendingStep | None = None  # the batch that was handed out, or had a gradient pass, last
        self.last_done: StepDone | None = None  # the report of the last step
        self._files, self._models, self._consensus = parts.files, parts.models, place.consensus
        self._prepared, self._rates = parts.prepared, LearningRates()
        self._scope, self._stepped, self._is_elastic = parts.scope, stepped, parts.plan.layout.is_elastic
        self._scales_losses = parts.plan.compute.precision == "fp16"
        self._counts = place.axes.counts  # whether this worker's samples are written down; others may run the same
        self._add_work = place.recorder.add_work  # of micro-batches, and a step's seconds: to find stragglers
        self._open: dict[str, PendingStep] = {}  # by stream
        self._num_batches = self._num_skips = self._num_overflows = 0  # the last two: in a row
        self._num_committed = self._num_trained = 0  # by this worker
        self._num_left_out = self._num_unstepped = 0  # of them, those that were to train
        self._recovery_reported_s = 0.0
        self._reported_at, self._bytes_reported = time.perf_counter(), 0
        self._wire_reported = SentBytes()
        self._warned: set[str] = set()
        self.data_pace = DataPace(
            tell=lambda text: self._files.emit(Note(text=text)),
            warn=lambda text, once: self.warn(text, once=once),
            is_first=place.group.index == 0,
        )
        self.is_counting = False  # the steps of a program's own loop: what it reports belongs to its next step
        self._between: dict[str, Tensor | float] = {}

    def state_dict(self) -> dict[str, int]:
        """The counts, for a newcomer, which begins with the batch that is under way here."""
        under_way = sum(not step.is_committed for step in self._open.values())
        return {
            "step": self.step,
            "batches": self._num_batches - under_way,
            "skips": self._num_skips,
            "trained": self._num_trained,
        }

    def load_state_dict(self, counts: Mapping[str, int]) -> None:
        """Count on from a member's counts."""
        self.step, self._num_batches, self._num_skips = counts["step"], counts["batches"], counts["skips"]
        self._num_trained = counts.get("trained", 1)

    def begin_at(self, step: int) -> None:
        """Count on from a checkpoint. The steps before it may have trained: together they count as one that has."""
        self.step, self._num_trained = step, int(step > 0)

    def open(self, batch: StepBatch, cursor: StreamPosition) -> None:
        """A stream hands out a batch."""
        self._num_batches += 1
        batch.serial = self._num_batches
        self.latest = self._open[batch.stream] = PendingStep(batch, cursor)

    def begin_pass(self, batch: StepBatch) -> PendingStep:
        """A gradient pass over a batch begins: it gets the number of the next step, unless it is committed already."""
        step = self._of(batch)
        if not step.is_committed:
            batch.step = self.step + 1
        self.latest = step
        return step

    def end_pass(self, step: PendingStep, outcome: StepOutcome, *, names_unused: bool) -> None:
        """All workers have agreed."""
        step.communication_s += outcome.communication_s
        step.agreed_at = time.perf_counter()
        if outcome.is_empty:
            return
        step.outcome = step.outcome or outcome
        if outcome.is_idle or outcome.is_late:
            return
        self._count_skips(step.batch.step, outcome)
        if outcome.finite and math.isnan(outcome.loss):
            self.warn(f"step {step.batch.step}: the loss is not a number (a total count of 0?)")
        if outcome.unused and names_unused:
            shown = ", ".join(sorted(outcome.unused)[:NAMED_AT_MOST])
            more = len(outcome.unused) - NAMED_AT_MOST
            more_text = f" and {more} more" if more > 0 else ""
            text = f"these parameters got no gradient from any worker and stay as they are: {shown}{more_text}"
            self.warn(text, once="unused")

    def _count_skips(self, number: int, outcome: StepOutcome) -> None:
        """Say that a step is skipped, a few times in a row; a run that only skips has lost its weights, and ends. With
        a guard of its own the plan says more, and other limits."""
        if outcome.spike is not None:
            return
        if outcome.next_loss_scale is not None:
            self._tell_overflow(number, outcome.next_loss_scale)
            return
        self._num_overflows = 0
        self._num_skips = 0 if outcome.finite else self._num_skips + 1
        if 0 < self._num_skips <= SKIPS_REPORTED:
            more = "; further ones in a row are not reported" if self._num_skips == SKIPS_REPORTED else ""
            workers = "by this replica" if self._scope.counts_later else "on all workers"
            text = f"step {number} was skipped {workers}: its gradients are not finite (loss {outcome.loss:.4g})"
            if outcome.broken:
                text += f", that of {outcome.broken} first in backward"
            if outcome.loss_scale is not None:
                text += f", with a loss scale of {scale_text(outcome.loss_scale)}"
            self.warn(text + more)
        if outcome.loss_scale == LEAST and math.isfinite(outcome.loss) and self._num_skips >= SKIPS_AT_LEAST_SCALE:
            raise RuntimeError(
                f"the gradients of {SKIPS_AT_LEAST_SCALE} steps in a row overflowed in fp16, whose loss scale cannot "
                f"be lower than {LEAST:g} (loss {outcome.loss:.4g}): gradients, or values that forward computes, are "
                "beyond 65504. Use Compute(precision='bf16'), which has the range of fp32, or a smaller loss; or look "
                "at the first skipped step"
            )
        if self._num_skips >= SKIPS_ALLOWED:
            raise RuntimeError(
                f"the gradients of {SKIPS_ALLOWED} steps in a row were not finite (loss {outcome.loss:.4g}): the "
                "weights, the "
                "data or the loss are broken. Lower the learning rate, clip (clip_norm=1.0), or look at the "
                "first skipped step"
            )

    def _tell_overflow(self, number: int, next_scale: float) -> None:
        """Say that a step is skipped because of its loss scale, a few times in a row. It does not count as broken."""
        self._num_overflows += 1
        if self._num_overflows > SKIPS_REPORTED or self._scope.group.index:
            return
        more = "; further ones in a row are not reported" if self._num_overflows == SKIPS_REPORTED else ""
        text = f"step {number} was skipped: its gradients overflowed in fp16; the loss scale is now "
        self._files.emit(Note(text=f"{text}{scale_text(next_scale)}{more}"))

    def commit(self, batch: StepBatch) -> None:
        """The weights have changed (or the step is skipped): the batch is done."""
        step = self._of(batch)
        now = time.perf_counter()
        step.optimizer_s += now - step.agreed_at
        step.agreed_at = now
        if step.is_committed:
            self._stepped(batch, True)
        elif step.outcome is not None:
            self._commit(step)

    def end(self, stream: str) -> None:
        """The loop asks for the stream's next batch, so no optimizer will step for this one any more: it is done."""
        step = self._open.get(stream)
        if step is not None and not step.is_committed and step.outcome is not None and step.is_skipped:
            self._commit(step)  # a GradScaler has left out the optimizer's step, too
        elif step is not None and not step.is_committed:
            self.warn(
                f"no prepared optimizer stepped for batch {step.batch.serial}: its samples count as used, its "
                "gradients "
                "are dropped. Prepare the optimizer and call optim.step() for every batch; to accumulate, use a larger "
                "Batch(size=...)",
                once="unstepped",
            )
            self._num_unstepped += step.outcome is not None
            step.outcome = None
            self._commit(step)

    def close(self, stream: str) -> None:
        """Everything that belongs to the stream's batch has been done."""
        self.end(stream)
        step = self._open.pop(stream, None)
        if step is None:
            return
        self._report_step(step)
        if self.latest is step:
            self.latest = None

    def leave(self, stream: str | None = None) -> None:
        """Loops (or one) were left early, or in an error: report what was committed, and forget the rest."""
        for name in [stream] if stream is not None else list(self._open):
            step = self._open.pop(name, None)
            if step is not None and step.is_committed:
                self._report_step(step)
            if self.latest is step:
                self.latest = None

    def is_committed(self, stream: str) -> bool:
        """Whether the batch of a stream that was handed out last is done."""
        step = self._open.get(stream)
        return step is not None and step.is_committed

    @property
    def training_counts(self) -> list[float]:
        """This worker's steps that have changed weights; and of those that were to, how many were left out, and for
        how many no optimizer stepped. Sums over all workers are what `require_trained` asks for."""
        return [self._num_trained, self._num_left_out, self._num_unstepped]

    def require_trained(self, counts: Sequence[float], *, has_optimizer: bool) -> None:
        """Raise RuntimeError where not one of the run's steps has changed any weight, though it was to train.

        `counts` are all workers' `training_counts`, added up: the steps of any replica count, also of those that take
        them by themselves. A run that takes no step, goes on from its own end, or passes over data without backward
        and optimizer, was not to train.
        """
        num_trained, num_left_out, num_unstepped = counts
        if num_trained or not has_optimizer or not num_left_out + num_unstepped:
            return
        count = "its only step" if self.step == 1 else f"all its {self.step:,} steps"
        why = (
            "no prepared optimizer stepped. Prepare the optimizer and call optim.step() for every batch, or use "
            "worker.stepper(...)"
            if num_unstepped
            else "losses or gradients were not finite, or leapt, and no worker took the step. Lower the learning rate, "
            "clip (clip_norm=1.0), or look at the data of the first steps"
        )
        if self._scales_losses and not num_unstepped:
            why += ". In fp16 the first steps find the loss scale: take more, or begin with a smaller loss_scale_start"
        raise RuntimeError(f"the run has trained nothing: in {count} {why}. Nothing is saved at the end")

    def count(self, rates: Mapping[str, Tensor | float], *, loss: float | None) -> None:
        """Report one more step of a program that has a loop of its own. Its samples are not known, and `loss` is of
        this worker's share of them; what the script itself reports as its loss counts before that."""
        now = time.perf_counter()
        seconds = {"total": now - self._reported_at}
        self.step, self._reported_at = self.step + 1, now
        self._num_committed, self._num_trained = self._num_committed + 1, self._num_trained + 1
        self.last_done = StepDone(
            step=self.step,
            epoch=0,
            num_samples=0,
            loss=None,
            metrics={
                **({} if loss is None else {"loss": loss}),
                **{name: float(value) for name, value in self._between.items()},
            },
            optimizer={name: float(value) for name, value in rates.items()},
            seconds=seconds,
        )
        self._between.clear()
        self._files.emit(self.last_done)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Note values of the latest batch; between batches they are reported at once."""
        values = {name_text(name): _number(name_text(name), value) for name, value in metrics.items()}
        if self.latest is not None:
            self.latest.metrics.update(values)
        elif self.is_counting:
            self._between.update(values)
        else:
            numbers = {name: float(value) for name, value in values.items()}
            self._files.emit(Reported(step=self.step, metrics=numbers))

    def warn(self, text: str, *, once: str | None = None) -> None:
        """Warn; with `once` only the first time for that key."""
        if once is None or once not in self._warned:
            self._warned.add(once or "")
            self._files.emit(Warned(text=text))

    def _of(self, batch: StepBatch) -> PendingStep:
        step = self._open.get(batch.stream)
        if step is None or step.batch is not batch:
            raise RuntimeError(
                f"{batch} is over: the loop has asked for the next batch of stream {batch.stream!r}, or was left. "
                "step(batch) belongs inside the loop"
            )
        return step

    def _commit(self, step: PendingStep) -> None:
        for other in self._open.values():
            if other.is_committed and not other.is_reported:
                self._report_step(other)
        batch = step.batch
        self.step += 1
        self._num_committed += 1
        self._num_trained += step.outcome is not None and step.outcome.is_taken
        self._num_left_out += step.is_skipped and step.outcome is not None
        batch.step = self.step
        step.is_committed = True
        step.rates = self._rates.now(self._prepared.own_optimizers())  # now: a scheduler comes after the optimizer
        step.cursor.epoch, step.cursor.position = batch.epoch, batch.stop
        micros = batch.micros if self._counts else ()
        self._stepped(batch, False)
        if step.outcome is not None and step.outcome.is_late:
            return  # it is in the ledgers of the workers that took it
        self._files.ledger.committed(
            batch,
            micros,
            step=batch.step,
            skipped=step.is_skipped and not self._scope.counts_later,  # else by this replica alone
            is_whole=self._is_elastic or self._scope.is_alone or batch.chosen is not None,
            waits=self._scope.counts_later,
        )

    def _report_step(self, step: PendingStep) -> None:
        if step.is_reported:
            return
        step.is_reported = True
        batch, outcome = step.batch, step.outcome
        now, num_bytes, wire = (
            time.perf_counter(),
            self._models.reducers.num_bytes_sent(),
            self._models.reducers.wire_bytes(),
        )
        if self._files.capture is not None and outcome is not None:
            self._files.capture.loss(batch.step, outcome.loss)
        seconds = {
            "data": batch.data_s,
            "compute": step.compute_s,
            "communication": step.communication_s,
            "optimizer": step.optimizer_s,
            "total": now - self._reported_at,
        }
        recovery_s = self._consensus.recovery_s
        if recovery_s > self._recovery_reported_s:
            seconds["recovery"] = recovery_s - self._recovery_reported_s
            self._recovery_reported_s = recovery_s
        self._add_work(len(batch), seconds)
        self.data_pace.step(batch, seconds)
        self.last_done = StepDone(
            step=batch.step,
            epoch=batch.epoch,
            num_samples=batch.num_samples,
            loss=None if outcome is None or outcome.is_idle else outcome.loss,
            num_here=None if batch.num_here == batch.num_samples else batch.num_here,
            metrics={name: float(value) for name, value in step.metrics.items() if not _is_on_another_stage(value)},
            optimizer=_of_optimizer(step),
            seconds=seconds,
            skipped=step.is_skipped,
            num_bytes_sent=num_bytes - self._bytes_reported,
            num_wire_bytes=wire.num_sent - self._wire_reported.num_sent,
            num_raw_bytes=wire.num_raw - self._wire_reported.num_raw,
            noise_scale=None if outcome is None else outcome.noise_scale,
            alone=self._scope.is_alone,
            num_dropped=sum(micro.num_samples for micro in batch.dropped),
            late=outcome is not None and outcome.is_late,
        )
        self._files.emit(self.last_done)
        self._reported_at, self._bytes_reported, self._wire_reported = now, num_bytes, wire


def _of_optimizer(step: PendingStep) -> dict[str, float]:
    """Learning rates; the norm of the gradients: seven digits are what single precision has; the loss scale."""
    found, outcome = {name: float(value) for name, value in step.rates.items()}, step.outcome
    if outcome is not None and outcome.grad_norm is not None:
        found["grad_norm"] = float(f"{outcome.grad_norm:.7g}")
    if outcome is not None and outcome.loss_scale is not None:
        found |= {"loss_scale": outcome.loss_scale, "overflows": float(outcome.num_overflows)}
    return found


def _is_on_another_stage(value: Tensor | float) -> bool:
    """Whether another worker has the number: what is reported inside of a forward in stages, the last one knows."""
    return isinstance(value, Tensor) and value.is_meta


def _number(name: str, value: Any) -> Tensor | float:
    """The value as it is now; tensors stay on their device, so that nothing waits for it."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"worker.report({name}=...) got a tensor of shape {list(value.shape)}; report single numbers"
            )
        return value.detach().reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = name_text(repr(value))
        raise TypeError(f"worker.report({name}={shown}): report numbers, or tensors of one element") from None
