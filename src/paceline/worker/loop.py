"""The loop over steps: hands out batches, walks over them, commits, and does what is due between two steps.

A step is a transaction: `walk` is its inside, `commit` its end. Between two steps the members may change, shares are
dealt anew, snapshots and checkpoints are taken; all workers come to these places in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.group import Disrupted
from paceline.events import Note, StreamOpened
from paceline.plan import Plan
from paceline.sync.allreduce import GradientSum
from paceline.worker.balance import Balance
from paceline.worker.batch import StepBatch
from paceline.worker.books import Books
from paceline.worker.cursor import Cursor
from paceline.worker.guarding import Guarding
from paceline.worker.models import Models
from paceline.worker.place import Place
from paceline.worker.preparing import Preparation
from paceline.worker.record import RunFiles
from paceline.worker.stream import Source, Stream
from paceline.worker.walk import Again, Outcome, Walks

if TYPE_CHECKING:
    from paceline.worker.pipelined import Pipelined

__all__ = ["Loop"]


class Loop:
    """All streams of one worker, and the steps that it takes with the others."""

    def __init__(
        self,
        plan: Plan,
        *,
        place: Place,
        walks: Walks,
        models: Models,
        prepared: Preparation,
        guarding: Guarding,
        files: RunFiles,
    ) -> None:
        self.walks, self.streams = walks, dict[str, Stream]()
        self.books = Books(
            files,
            models.num_bytes_sent,
            is_elastic=plan.layout.is_elastic,
            add_work=place.ring.add_work,
            counts=place.axes.counts,
            recovery_s=lambda: self._agreement.recovery_s,
        )
        self.saved_at_step = -1
        self.is_stopped = False  # by max_steps
        self._plan, self._files, self._models = plan, files, models
        self._prepared, self._guarding = prepared, guarding
        self._group, self._agreement, self._ring = place.group, place.agreement, place.ring
        self._balance, self._balanced_at = Balance(is_on=files.balances and not place.axes.is_split), -1
        if files.balances and place.axes.is_split and place.group.index == 0:
            files.emit(Note(text="balance is not used: the workers of a replica run in step with each other"))
        self._axes = place.axes
        self._landed: GradientSum | None = None  # the gradients of the last walk

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self.books.step

    @property
    def cursors(self) -> dict[str, Cursor]:
        """Where each stream stands."""
        return {name: stream.cursor for name, stream in self.streams.items()}

    def open(self, source: Source, *, timeout_s: float) -> Iterator[StepBatch]:
        """Begin a stream; returns its batches."""
        stream = Stream(
            source,
            self._plan.batch,
            cursor=self._prepared.cursor(source.name),
            group=self._group,
            walk=self._plain_walk,
            together=self._agreement.run,
            balance=self._balance,
            timeout_s=timeout_s,
            axes=self._axes,
        )
        self.streams[source.name] = stream
        self._prepared.begin_training()
        self._say_what_goes_on(stream)
        self._files.ledger.opened(source.name, **stream.about())
        last_step = stream.last_step(self.step)
        self._files.emit(
            StreamOpened(name=source.name, num_samples=stream.num_samples, epochs=source.epochs, last_step=last_step)
        )
        return self._steps(stream)

    def _say_what_goes_on(self, stream: Stream) -> None:
        """Tell what of a stream is not as it was when its checkpoint was saved."""
        if self._group.index != 0:
            return
        if stream.was_finished:
            self.books.warn(
                f"stream {stream.source.name!r} was finished before the checkpoint: its loop is empty now, and code "
                "after it runs again. Use epochs=n and batch.ends_epoch instead",
                once="finished",
            )
            return
        for text in stream.notes:
            self._files.emit(Note(text=text))

    def _steps(self, stream: Stream) -> Iterator[StepBatch]:
        name = stream.source.name
        steps = stream.steps(lambda: self.step + 1)
        while True:
            self._ring.begin("between two steps", self.step)
            self._agreement.between_steps()
            self._rebalance()
            self._guarding.keep(self.step, self.cursors)
            self._ring.begin("waiting for data", self.step + 1)
            batch = next(steps, None)
            if batch is None:
                return
            if self._files.is_last_step(self.step):
                self._stop()
                return
            self.books.open(batch, stream.cursor)
            try:
                yield batch
            except GeneratorExit:
                # The user left the loop, by `break` or by an error on its way: what was not committed did not happen.
                self.books.leave(name)
                self._guarding.settle(self.step, self.cursors)
                raise
            self.books.close(name)
            self._guarding.settle(self.step, self.cursors)
            self._ring.begin("between two steps", self.step)
            self._guarding.compare(self.step, is_save_due=self._files.is_save_due(self.step))
            if self._files.is_save_due(self.step) and self.saved_at_step != self.step:
                self.save()
            elif self._files.saves_regularly:
                self._prepared.warm()

    def _rebalance(self) -> None:
        """Where a look is due, compare what a micro-batch takes each worker, and deal them anew if that gains."""
        if not self._balance.is_due(self.step) or self.step == self._balanced_at:
            return
        self._balanced_at = self.step
        measured, num_micro = self._balance.measured(), self._plan.batch.num_micro
        seconds = self._agreement.run(lambda: self._group.gather_objects(measured))
        if len(seconds) != self._group.size or not self._balance.agree(seconds, num_micro):
            return
        for stream in self.streams.values():
            stream.members_changed()
        if self._group.index == 0:
            counts = [len(share) for share in self._balance.shares(num_micro, len(seconds))]
            took = ", ".join(f"{one * 1e3:.3g}" for one in seconds)
            text = (
                f"after step {self.step} the workers run {counts} of a step's micro-batches each, by how long one has "
                f"taken them: {took} ms"
            )
            self._files.emit(Note(text=text))

    def _stop(self) -> None:
        """A loop ends at max_steps: what a later start goes on from is the state of now. Code after the loop will run
        there too, in its time, so what it does today is not saved at the end."""
        is_saved = self._files.is_save_due(self.step)  # by the save that was due after this very step
        if self._files.saves_at_end and not self.is_stopped and self.step > self._prepared.step and not is_saved:
            self.save()
        self.is_stopped = True

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background."""
        self.walks.shards.close()
        self._ring.begin("saving", self.step)
        self._guarding.put_back(self.step, self.cursors)
        self.saved_at_step = self.step
        self._prepared.save(step=self.step, cursors=self.cursors)

    # One step.

    def walk(
        self,
        batch: StepBatch,
        gradients: GradientSum,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
        pipelined: Pipelined | None = None,
    ) -> Outcome:
        """Walk over a batch for a stepper; returns what all workers agreed on. `pipelined`: through stages."""

        def run() -> Iterator[Any]:
            if pipelined is not None:
                return self.walks.run_in_stages(batch, gradients, pipelined, is_finite=is_finite)
            return self.walks.run(batch, gradients, is_finite=is_finite)

        for micro in self._timed_walk(batch, gradients, run, names_unused=True):
            self.walks.backward(loss_of(micro))
        return cast("Outcome", self.walks.outcome)

    def _plain_walk(self, batch: StepBatch) -> Iterator[Any]:
        # With several models each walk of a plain loop is about one of them: the others are idle on purpose.
        models = list(self._models)
        if not models:
            raise RuntimeError("no model is prepared, so nothing would be averaged: model = worker.prepare(model)")
        if self._axes.link is not None:
            raise RuntimeError(
                f"a plain loop over a batch under Layout(stages={self._plan.layout.stages}): forwards and backwards of "
                "all micro-batches are one run through the stages. Write: step = worker.stepper(model, optim, loss), "
                "and in the loop over batches: loss = step(batch)"
            )
        gradients = self._models.sum_over(models)
        return self._timed_walk(
            batch, gradients, lambda: self.walks.run(batch, gradients), names_unused=len(models) == 1
        )

    def _timed_walk(
        self, batch: StepBatch, gradients: GradientSum, run: Callable[[], Iterator[Any]], *, names_unused: bool
    ) -> Iterator[Any]:
        """Walk by `run`, again where a member was lost meanwhile, and book what it took."""
        step = self.books.begin_walk(batch)
        self._ring.begin("forward and backward", batch.step)
        began, data_s = time.perf_counter(), batch.data_s
        while True:
            try:
                yield from run()
                break
            except Disrupted as disruption:
                if self._agreement.elastic is None:
                    raise
                if not isinstance(disruption, Again):
                    self._agreement.regroup(holds_result=False)
            # The same step comes again, with new shares: its samples, and so its gradient, are the same.
            if batch.num_walks == 0:
                self._agreement.hold()
            self._agreement.recovery_s += time.perf_counter() - began - (batch.data_s - data_s)
            self.streams[batch.stream].redeal(batch)
            began, data_s = time.perf_counter(), batch.data_s
        outcome = cast("Outcome", self.walks.outcome)
        self._landed = gradients
        step.compute_s += time.perf_counter() - began - outcome.communication_s - (batch.data_s - data_s)
        self._ring.begin("optimizer and the loop's code", batch.step)
        self._balance.note(time.perf_counter() - began - outcome.communication_s, len(batch))
        if self.walks.broken:
            self._guarding.broken(batch, self.walks.broken, self.cursors[batch.stream].of)
        if outcome.spike is not None:
            self._guarding.spiked(batch.step, outcome.spike)
        self.books.end_walk(step, outcome, names_unused=names_unused)

    def clip(self, max_norm: float) -> Tensor:
        """Bound the global norm of the last walk's gradients; returns what it was."""
        gradients = self._landed
        if self.walks.under_way or gradients is None or self.walks.outcome is None:
            raise RuntimeError(
                "worker.clip_gradients() belongs after a walk over a batch: for x, y in batch: worker.backward(...)   "
                "then worker.clip_gradients(max_norm)   then optim.step()"
            )
        norm = gradients.norm()
        if self.walks.outcome.is_taken:
            gradients.clip(max_norm, norm)
        return norm

    def commit(self, batch: StepBatch) -> None:
        """End the transaction of a batch: steppers call it, and prepared optimizers in the plain loop."""
        self.books.commit(batch)
        self._agreement.committed()

    def follow(self, optimizer: Optimizer) -> None:
        """A prepared optimizer's `step()` ends the transaction in plain loops, and is refused where it comes too
        early."""
        self._models.check(optimizer)
        optimizer.register_step_pre_hook(self._before_optimizer)
        optimizer.register_step_post_hook(self._after_optimizer)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.walks.under_way:
            raise RuntimeError(
                "optim.step() was called inside the walk over a batch, before the gradients were averaged. "
                "Put it after the loop: for x, y in batch: worker.backward(...)   then   optim.step()"
            )
        self._models.check(optimizer)
        step = self.books.latest
        if step is None or step.batch.num_walks == 0:
            return
        if self.walks.outcome is None:
            raise RuntimeError(
                "the walk over this batch was left early (break, or an error that was caught), so its gradients "
                "were not averaged and are dropped. Walk over the batch to its end before optim.step()"
            )
        if self.walks.outcome.is_empty:
            raise RuntimeError(
                "the last walk over this batch called no worker.backward(): there is nothing for optim.step() to apply"
            )
        if self._landed is not None:
            self._landed.check_unchanged()
        if self._files.capture is not None:
            names = self._prepared.registry.parameter_names()
            parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
            self._files.capture.gradients(step.batch.step, parameters, self._models.whole)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.books.latest is not None:
            self.commit(self.books.latest.batch)

    # When the members are others.

    def members_changed(self) -> None:
        """Forget what was made for the old ones."""
        self._models.members_changed()
        for stream in self.streams.values():
            stream.members_changed()
        self._balance.forget()

    def plain(self) -> dict[str, Any]:
        """The counts, for a newcomer."""
        return {"books": self.books.plain(), "balanced_at": self._balanced_at}

    def fill(self, state: dict[str, Any]) -> None:
        """Count on from a member's counts."""
        self.books.fill(state["books"])
        self.saved_at_step, self._balanced_at = self.books.step, state["balanced_at"]

    def begin_at(self, step: int) -> None:
        """The run goes on from a checkpoint."""
        self.books.step = self.saved_at_step = step
        self._guarding.begin(step)
