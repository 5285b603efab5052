"""The loop over steps: opens streams of batches, runs gradient passes over them, and commits steps.

A step is a transaction: gradient passes are its inside, and `commit` ends it. A `StepMode` decides how steps are taken
together with other replicas. `BetweenSteps` does what is due between two steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.group import Disrupted
from paceline.comm.sharded_tensors import local_part
from paceline.events import Note, StreamOpened
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.worker.data.batch_stream import BatchStream, StreamSource
from paceline.worker.data.lane_stream import LaneStream
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.optimizer_closure import closure_in, global_closure, replaced_closure
from paceline.worker.loop.optimizer_hooks import keep_last
from paceline.worker.loop.step_log import StepLog
from paceline.worker.loop.step_mode import StepMode, StepTaker
from paceline.worker.parts import WorkerParts
from paceline.worker.state.codec_state import GatheredCodecState
from paceline.worker.step.grad_scaler import scaled_losses
from paceline.worker.step.memory_shortage import PassOutOfMemory
from paceline.worker.step.step_outcome import StepInvalidated, StepOutcome
from paceline.worker.step.unit_draws import UnitDraws

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelinePass

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """All streams of one worker, and the steps that it takes with the others."""

    def __init__(self, parts: WorkerParts, mode: type[StepMode]) -> None:
        """`mode`: how steps are taken, by the workers in `parts.scope`."""
        place = parts.scope.place
        self.executor = parts.executor
        self.step_log = StepLog(parts, stepped=lambda batch, is_again: self.mode.stepped(batch, is_again=is_again))
        self.between = BetweenSteps(parts, self.step_log)
        self.mode = mode(parts, self.between)
        self._plan, self._files, self._models = parts.plan, parts.files, parts.models
        self._sizes = parts.sizes
        self._prepared, self._resumed, self._numerical_guard = parts.prepared, parts.resumed, parts.numerical_guard
        self._has_servers = parts.servers is not None
        self._is_stepping = False
        self._group, self._consensus, self._recorder = place.group, place.consensus, place.recorder
        self._consensus.before_each_operation(self.mode.before_operation)
        self.executor.observer = self._files.module_capture
        if self._files.capture is not None and self._files.capture.wants_draws_by_unit:
            self.executor.unit_draws = UnitDraws(parts.models.layout.units.items)
        self._axes = place.axes
        self._last_pass: GradientReducer | None = None  # the gradients of the last pass
        self._plain_batch: StepBatch | None = None  # the last one of a plain loop whose gradients are to be applied
        self._unapplied: set[Optimizer] = set()  # those that have not stepped in it
        self._unsettled: list[GradientReducer] = []  # those of passes whose step is to be taken

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self.step_log.step

    @property
    def cursors(self) -> dict[str, StreamPosition]:
        """The position of each stream."""
        return self.between.cursors

    @property
    def streams(self) -> dict[str, BatchStream]:
        """All streams that were opened, by name."""
        return self.between.streams

    def open(
        self, source: StreamSource, *, timeout_s: float, sizes: MicroBatchSize | None = None
    ) -> Iterator[StepBatch]:
        """Begin a stream; returns its batches, of the plan's size or of `sizes`.

        One that was open under this name goes on where it was left: with more epochs, for a loop over data whose end is
        not known. Raises RuntimeError where replicas have left another at different steps.
        """
        terms = self.mode.begin_stream()
        before = self.streams.get(source.name)
        stream = (LaneStream if source.lanes else BatchStream)(
            source,
            sizes or self._sizes,
            cursor=self.between.positions.saved(source.name) if before is None else before.cursor,
            group=self._group,
            run_pass=self._plain_pass,
            together=self._consensus.run,
            balance=self.between.balance,
            timeout_s=timeout_s,
            axes=self._axes,
            replicas=terms.replicas,
        )
        self.streams[source.name] = stream
        self.step_log.data_pace.opened(stream)
        self._resumed.begin_training()
        self._note_changes(stream)
        self.between.tell_micro_batch()
        self._files.ledger.opened(
            source.name, drawn=stream.drawn, shares=stream.shares(), **stream.about(), **terms.ledger_facts
        )
        last_step = stream.last_step(self.step)
        self._files.emit(
            StreamOpened(name=source.name, num_samples=stream.num_samples, epochs=source.epochs, last_step=last_step)
        )
        return self.mode.open(stream)

    def _note_changes(self, stream: BatchStream) -> None:
        """Report what of a stream is not as it was when its checkpoint was saved."""
        if self._group.index != 0:
            return
        if stream.was_finished:
            self.step_log.warn(
                f"stream {stream.source.name!r} was finished before the checkpoint, so its loop is empty now. Code "
                "after the loop runs again: what is to run once belongs into it (if batch.ends_epoch: ...)",
                once="finished",
            )
            return
        if stream.source.takeover:
            text = f"the DataLoader of stream {stream.source.name!r} is taken over; {stream.source.takeover}"
            self._files.emit(Note(text=text))
        for text in stream.notes:
            self._files.emit(Note(text=text))

    def save(self, gathered: GatheredCodecState | None = None) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background.

        All workers must call it; within an operation of all of them, with what they have `gathered` there.
        """
        self.mode.before_save()
        self.between.save(gathered)

    # One step.

    def run_pass(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
        pipelined: PipelinePass | None = None,
    ) -> StepOutcome:
        """Make a gradient pass over a batch for a stepper; returns what all workers agreed on. `pipelined`: through the
        model's stages."""

        def run() -> Iterator[Any]:
            if pipelined is not None:
                return self.executor.run_pipeline(batch, gradients, pipelined, is_finite=is_finite)
            return self.executor.run(batch, gradients, is_finite=is_finite, forward=loss_of)

        for micro in self._timed_pass(batch, gradients, run, names_unused=True):
            with self.executor.shortage.survived():
                self.executor.backward(loss_of(micro))
        return cast("StepOutcome", self.executor.outcome)

    def _plain_pass(self, batch: StepBatch) -> Iterator[Any]:
        # With several models each pass of a plain loop is about one of them: the others are idle on purpose.
        models = list(self._models)
        if not models:
            raise RuntimeError("no model is prepared, so nothing would be averaged: model = worker.prepare(model)")
        if self._axes.link is not None:
            raise RuntimeError(
                f"a plain loop over a batch under Layout(stages={self._plan.layout.stages}): forwards and backwards of "
                "all micro-batches are one run through the stages. Write: step = worker.stepper(model, optim, loss), "
                "and in the loop over batches: loss = step(batch)"
            )
        if self._has_servers:
            raise RuntimeError(
                "a plain loop over a batch under ParameterServer(...): optimizers run on the servers, so optim.step() "
                "has nothing to do here. Write: step = worker.stepper(model, optim, loss), and in the loop over "
                "batches: loss = step(batch)"
            )
        self.mode.check_plain_loop()
        gradients = self._models.reducers.sum_over(models)
        self._require_applied(batch, gradients)
        return self._scaled_pass(batch, gradients, names_unused=len(models) == 1)

    def _require_applied(self, batch: StepBatch, gradients: GradientReducer) -> None:
        """A pass of a plain loop removes the gradients of the last one. Raises RuntimeError where they are of another
        batch in which their optimizer has not stepped: in one process the new ones would be added."""
        last = self._plain_batch
        if last is None or last is batch:
            return
        self._plain_batch = None
        optimizers = self._prepared.registry.optimizers
        stepped = [one for one in optimizers.values() if one not in self._unapplied] if self._unapplied else []
        applied = {id(parameter) for one in stepped for parameter in _parameters(one)}
        for name, optimizer in optimizers.items():
            left = (one for one in _parameters(optimizer) if id(one) not in applied)
            if optimizer in self._unapplied and gradients.are_left(left):
                raise RuntimeError(
                    f"the gradients of batch {last.serial} are still there, and {name!r} has not stepped on them. "
                    "Gradients are not accumulated over batches: use a larger Batch(size=...). To leave out a step, "
                    "call zero_grad() of that optimizer"
                )

    def _scaled_pass(self, batch: StepBatch, gradients: GradientReducer, *, names_unused: bool) -> Iterator[Any]:
        """Make a pass of a plain loop, of losses that a GradScaler may have scaled."""
        yield from self._timed_pass(
            batch, gradients, lambda: self.executor.run(batch, gradients), names_unused=names_unused
        )
        outcome = self.executor.outcome
        is_first = self._plain_batch is None  # of the batch: an optimizer that has stepped in it once has taken it
        if is_first and outcome is not None and outcome.is_taken and not outcome.is_empty:
            self._plain_batch, self._unapplied = batch, set(self._prepared.registry.optimizers.values())
        if outcome is not None and not (outcome.is_taken or outcome.is_idle) and scaled_losses.has_scaler:
            gradients.poison()  # the scaler then skips the step, and lowers its scale, on all workers

    def _timed_pass(
        self, batch: StepBatch, gradients: GradientReducer, run: Callable[[], Iterator[Any]], *, names_unused: bool
    ) -> Iterator[Any]:
        """Make a gradient pass by `run`, again where a member was lost meanwhile, and note the seconds that it took."""
        self._prepared.require_own_weights("a step")
        self.mode.before_step(batch)
        step = self.step_log.begin_pass(batch)
        if batch.num_passes == 0:
            self._unsettled.clear()
        self._recorder.begin("forward and backward", batch.step)
        self._capture_modules(batch)
        wire = self._files.wire_capture
        if wire is not None and wire.can_check(self._plan):
            wire.step = batch.step
            gradients.observe_wire(wire)
        began, data_s = time.perf_counter(), batch.data_s
        while True:
            try:
                yield from run()
                break
            except PassOutOfMemory:
                self.between.halve_micro_batches(batch.step, self.executor.shortage.text)
            except Disrupted as disruption:
                if self._consensus.elastic is None:
                    raise
                if not isinstance(disruption, StepInvalidated):
                    self._consensus.drop(disruption)
            # The same step comes again, with new shares: its samples, and so its gradient, are the same.
            if batch.num_passes == 0:
                self._consensus.hold()
            self._consensus.recovery_s += time.perf_counter() - began - (batch.data_s - data_s)
            self.streams[batch.stream].reassign(batch)
            began, data_s = time.perf_counter(), batch.data_s
        outcome = cast("StepOutcome", self.executor.outcome)
        self._last_pass = gradients
        if outcome.is_taken:
            self._unsettled.append(gradients)
        step.compute_s += time.perf_counter() - began - outcome.communication_s - (batch.data_s - data_s)
        self._recorder.begin("optimizer and the loop's code", batch.step)
        self.between.balance.note(time.perf_counter() - began - outcome.communication_s, len(batch))
        if self.executor.broken:
            self._numerical_guard.broken(batch, self.executor.broken, self.cursors[batch.stream].of)
        if self.executor.nonfinite_gradients:
            self._numerical_guard.broken_gradients(batch.step, self.executor.nonfinite_gradients)
        if outcome.spike is not None:
            self._numerical_guard.spiked(batch.step, outcome.spike)
        if self.executor.state.unjudged:
            self.step_log.warn(
                f"forward changes plain attributes ({', '.join(self.executor.state.unjudged[:4])}), and whether it "
                "reads them again could not be tried. Each worker has its own, and no checkpoint has them: what it "
                "reads again belongs in a buffer (register_buffer)",
                once="plain state",
            )
        self._capture_modules(batch, is_done=True)
        self.step_log.end_pass(step, outcome, names_unused=names_unused)

    def _capture_modules(self, batch: StepBatch, *, is_done: bool = False) -> None:
        """Note weights before a pass, and summed gradients after it, for a comparison module by module."""
        capture = self._files.module_capture
        if capture is None or not capture.is_due(batch.step):
            return
        models, whole = self._prepared.registry.models, self._models.whole
        if is_done:
            capture.summed(batch.step, batch.num_passes - 1, models, whole)
        else:
            capture.start(
                batch.step,
                models,
                whole,
                left_out=self._models.routed_experts(),
                splits=self._models.split_kinds(),
                context_size=self._axes.context.size,
            )

    def add_gradients(self, gradients: Sequence[tuple[Parameter, Tensor]], *, factor: float = 1.0) -> None:
        """Multiply the last pass's gradients, and add others to them, which are the same on all workers."""
        last, outcome = self._last_pass, self.executor.outcome
        if last is None or outcome is None or not outcome.is_taken:
            return
        if factor != 1.0:
            for parameter in last.parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(factor)
            last.changed()
        if gradients:
            last.add(gradients)

    def known_norm(self, parameters: Sequence[Tensor]) -> float | None:
        """The global norm of the last pass's gradients as they landed; None where it is not that of these parameters,
        or was not computed."""
        last, outcome = self._last_pass, self.executor.outcome
        if last is None or outcome is None or {id(one) for one in parameters} != {id(one) for one in last.parameters}:
            return None
        return outcome.grad_norm

    def clip(self, max_norm: float | None, *, max_value: float | None = None) -> Tensor:
        """Bound the global norm of the last pass's gradients, or their values; returns what the norm was."""
        gradients = self._last_pass
        if self.executor.under_way or gradients is None or self.executor.outcome is None:
            raise RuntimeError(
                "worker.clip_gradients() belongs after the loop over a batch: for x, y in batch: worker.backward(...)  "
                "then worker.clip_gradients(max_norm)   then optim.step()"
            )
        norm = gradients.norm()
        if self.executor.outcome.is_taken and max_norm is not None:
            gradients.clip(max_norm, norm)
        if self.executor.outcome.is_taken and max_value is not None:
            gradients.clip_values(max_value)
        return norm

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Meanwhile a stepper calls prepared optimizers, and commits when all have stepped. May be nested: a step of a
        round's end may be taken inside another."""
        was_stepping, self._is_stepping = self._is_stepping, True
        try:
            yield
        finally:
            self._is_stepping = was_stepping

    def commit(self, batch: StepBatch, *, by: StepTaker | None = None) -> None:
        """End the transaction of a batch, taken by a stepper; without one it was a prepared optimizer in the plain
        loop."""
        self.mode.commit(batch, by)
        for gradients in self._unsettled:
            gradients.settle()
        self._unsettled.clear()
        self._consensus.committed()

    def extra_pass(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
        pipelined: PipelinePass | None = None,
    ) -> StepOutcome:
        """Make a gradient pass that no step log counts: over a part of a batch that a lost replica should have run."""
        if pipelined is not None:
            self.executor.run_pipeline(batch, gradients, pipelined, is_finite=is_finite)
        else:
            for micro in self.executor.run(batch, gradients, is_finite=is_finite, forward=loss_of):
                self.executor.backward(loss_of(micro))
        self._last_pass = gradients
        return cast("StepOutcome", self.executor.outcome)

    def follow(self, optimizer: Optimizer) -> None:
        """A prepared optimizer's `step()` ends the transaction in plain loops, and is refused where it comes too
        early."""
        self._models.check(optimizer)
        if self._has_servers:
            return  # it steps there
        before = optimizer.register_step_pre_hook(self._before_optimizer)
        keep_last(optimizer, before)
        optimizer.register_step_post_hook(self._after_optimizer)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Called before a step of a prepared optimizer; a closure that it is given is replaced."""
        if self.executor.under_way:
            raise RuntimeError(
                "optim.step() was called inside the loop over a batch, before the gradients were averaged. "
                "Put it after the loop: for x, y in batch: worker.backward(...)   then   optim.step()"
            )
        self._models.check(optimizer)
        self._prepared.check_choices(optimizer)
        self._unapplied.discard(optimizer)
        self.executor.agreement.stepped(optimizer)
        step = self.step_log.latest
        closure = closure_in(args, kwargs)
        if step is not None and closure is not None:
            self.mode.before_optimizer(is_stepping=self._is_stepping)
            parameters = _parameters(optimizer)
            evaluate = global_closure(
                closure,
                batch=step.batch,
                executor=self.executor,
                parameters=parameters,
                check_unchanged=self._check_unchanged,
            )
            return replaced_closure(args, kwargs, evaluate)
        if step is None or step.batch.num_passes == 0:
            return None
        if self.executor.outcome is None:
            raise RuntimeError(
                "the loop over this batch was left early (break, or an error that was caught), so its gradients "
                "were not averaged and are dropped. Run the loop over the batch to its end before optim.step()"
            )
        if self.executor.outcome.is_empty:
            raise RuntimeError(
                "the last loop over this batch called no worker.backward(): there is nothing for optim.step() to apply"
            )
        self.mode.before_optimizer(is_stepping=self._is_stepping)
        self._check_unchanged()
        if self._last_pass is not None and not self.executor.outcome.is_taken:
            self._last_pass.drop()  # of infinite ones, which a GradScaler has been shown
        if self._files.capture is not None:
            names = self._prepared.registry.parameter_names()
            parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
            self._files.capture.gradients(step.batch.step, parameters, self._models.whole)
        return None

    def _check_unchanged(self) -> None:
        if self._last_pass is not None:
            self._last_pass.check_unchanged()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._unapplied.discard(optimizer)  # nor are those of its closure
        if self.step_log.latest is not None and not self._is_stepping:
            self.commit(self.step_log.latest.batch)

    # When the members are others.

    def members_changed(self) -> None:
        """Forget what was made for the old ones."""
        self._models.reducers.members_changed()
        self.mode.members_changed()

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a newcomer."""
        return self.between.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from a member's counts."""
        self.between.load_state_dict(state)

    def begin_at(self, step: int) -> None:
        """The run goes on from a checkpoint."""
        self.between.begin_at(step)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
