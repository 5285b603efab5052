"""The loop over steps: hands out batches, walks over them, commits, and does what is due between two steps.

A step is a transaction: `walk` is its inside, `commit` its end. Between two steps the members may change, shares are
dealt anew, snapshots and checkpoints are taken; all workers come to these places in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.group import Disrupted, WorkerGroup
from paceline.comm.sharded_tensors import local_part
from paceline.events import Note, StreamOpened
from paceline.plan import ParameterServer, Plan
from paceline.schedule.micro_batches import deal_to_replicas
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.worker.data.batch_stream import BatchStream, StreamSource
from paceline.worker.data.load_balancing import LoadBalancer
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.health.numerical_guard import NumericalGuard
from paceline.worker.loop.async_batches import AsyncBatches
from paceline.worker.loop.communication_rounds import CommunicationRounds, LoopPoint, RoundShare
from paceline.worker.loop.step_log import StepLog
from paceline.worker.loop.wire_advisor import WireAdvisor
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.checkpointing import CheckpointedObjects
from paceline.worker.state.codec_state import CodecState, GatheredCodecState
from paceline.worker.state.memory_checkpointing import MemoryCheckpointer
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.step.gradient_pass import StepExecutor, StepInvalidated, StepOutcome

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelinePass

__all__ = ["TrainingLoop"]


class StepTaker(Protocol):
    """Who took a step of a round, and can take another on what a lost replica should have run."""

    def run_more(self, batch: StepBatch) -> None: ...


class TrainingLoop:
    """All streams of one worker, and the steps that it takes with the others."""

    def __init__(
        self,
        plan: Plan,
        *,
        place: WorkerContext,
        everybody: WorkerGroup,
        walks: StepExecutor,
        models: PreparedModels,
        prepared: CheckpointedObjects,
        memories: CodecState,
        guarding: NumericalGuard,
        vaulting: MemoryCheckpointer,
        rounds: CommunicationRounds,
        files: RunFiles,
    ) -> None:
        self.walks, self.streams = walks, dict[str, BatchStream]()
        self.books = StepLog(
            files,
            models.num_bytes_sent,
            models.wire_bytes,
            is_elastic=plan.layout.is_elastic,
            add_work=place.recorder.add_work,
            counts=place.axes.counts,
            recovery_s=lambda: self._agreement.recovery_s,
            rounds=rounds,
            is_alone=plan.is_asynchronous and not plan.has_backup_workers,
        )
        self._advising = WireAdvisor(plan, place=place, models=models, emit=files.emit)
        self.saved_at_step = -1
        self.is_stopped = False  # by max_steps
        self._plan, self._files, self._models = plan, files, models
        self._prepared, self._numerical_guard, self._memory_checkpointer = prepared, guarding, vaulting
        self._memories, self._rounds = memories, rounds
        # The steps after which all had equal weights the last time, and the time before: but for rounds, the last two.
        self._equal_before = self._equal_at = 0
        self._is_deal_due = False  # when the round is over
        self._is_stepping = False
        # An operation may look at what the step that was taken brings: an end that is due comes before it.
        place.agreement.come_by(lambda: self.end_round(is_wanted=rounds.is_over(files.is_save_due)))
        self._takers: dict[int, list[StepTaker]] = {}  # who took which of the round's steps
        self._group, self._agreement, self._recorder = place.group, place.agreement, place.recorder
        self._balance, self._balanced_at = LoadBalancer(is_on=files.balances and not place.axes.is_split), -1
        if files.balances and place.axes.is_split and place.group.index == 0:
            files.emit(Note(text="balance is not used: the workers of a replica run in step with each other"))
        self._axes = place.axes
        self._takes_turns = plan.is_asynchronous
        self._dealt = AsyncBatches(
            plan,
            place=place,
            everybody=everybody,
            models=models,
            books=self.books,
            files=files,
            save=lambda: self.save(is_writer=True),
            stop=self._stop,
            forget=self.streams.pop,
        )
        self._landed: GradientReducer | None = None  # the gradients of the last walk
        self._unsettled: list[GradientReducer] = []  # those of walks whose step is to be taken

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self.books.step

    @property
    def cursors(self) -> dict[str, StreamPosition]:
        """Where each stream stands."""
        return {name: stream.cursor for name, stream in self.streams.items()}

    def open(self, source: StreamSource, *, timeout_s: float) -> Iterator[StepBatch]:
        """Begin a stream; returns its batches. Raises RuntimeError where a dealt one was left before its end."""
        self.require_common_step("worker.batches()")
        stream = BatchStream(
            source,
            self._plan.batch,
            cursor=self._prepared.cursor(source.name),
            group=self._group,
            walk=self._plain_walk,
            together=self._agreement.run,
            balance=self._balance,
            timeout_s=timeout_s,
            axes=self._axes,
            replicas=self._rounds.replicas if self._rounds.is_local else None,
        )
        self.streams[source.name] = stream
        self._follow_trained()
        self._prepared.begin_training()
        self._say_what_goes_on(stream)
        self._files.ledger.opened(source.name, **stream.about(), **_staleness_bound(self._plan))
        last_step = stream.last_step(self.step)
        self._files.emit(
            StreamOpened(name=source.name, num_samples=stream.num_samples, epochs=source.epochs, last_step=last_step)
        )
        return self._dealt.batches(stream) if self._takes_turns else self._steps(stream)

    def _say_what_goes_on(self, stream: BatchStream) -> None:
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

    def _steps(self, stream: BatchStream) -> Iterator[StepBatch]:
        name = stream.source.name
        steps = stream.steps(lambda: self.step + 1)
        while True:
            self._recorder.begin("between two steps", self.step)
            self._rounds.stand = LoopPoint.WAITING
            if not self._rounds.is_open:
                self._between_steps()
            self._recorder.begin("waiting for data", self.step + 1)
            batch = next(steps, None)
            if batch is None:
                self._end_last_round(stream)
                return
            if self._files.is_last_step(self.step):
                self._end_last_round()
                self._stop()
                return
            self.books.open(batch, stream.cursor)
            self._rounds.stand = LoopPoint.IN_HAND
            try:
                yield batch
            except GeneratorExit:
                # The user left the loop, by `break` or by an error on its way: what was not committed did not happen.
                self.books.leave(name)
                self._numerical_guard.settle(self.step, self.cursors)
                raise
            self.books.end(name)
            self._follow_steps()
            self.books.close(name)
            if self.books.told is not None:
                self._advising.note(self.books.told)
            self._numerical_guard.settle(self.step, self.cursors)
            self._recorder.begin("between two steps", self.step)
            if not self._rounds.is_open:
                self._after_step()

    def _between_steps(self) -> None:
        """What is due where all have equal weights."""
        self._agreement.between_steps()
        self._rebalance()
        is_kept = self._numerical_guard.keep(self.step, self.cursors)
        self._memory_checkpointer.keep(self.step, is_rollback_kept=is_kept)
        if self.step > self._equal_at:
            self._equal_before, self._equal_at = self._equal_at, self.step

    def _after_step(self) -> None:
        """The same, of what belongs to the step that was taken."""
        is_save_due = self._came_by(self._files.is_save_due)
        self._numerical_guard.compare(self.step, is_save_due=is_save_due)
        if is_save_due:
            self._agreement.run(self._prepared.wait)  # else who writes might wait alone, and the others in a step
        if is_save_due and self.saved_at_step != self.step:
            self.save()
        elif self._files.saves_regularly:
            self._prepared.warm()

    def _came_by(self, is_due: Callable[[int], bool]) -> bool:
        """Whether something was due at one of the steps since all had equal weights the last time before now."""
        since = self._equal_at if self.step > self._equal_at else self._equal_before
        return any(is_due(step) for step in range(since + 1, self.step + 1))

    @property
    def is_dealing(self) -> bool:
        """Whether batches go to whoever asks: replicas take different ones, and different numbers of them."""
        return self._dealt.is_dealing

    @property
    def has_left(self) -> bool:
        """Whether this replica has left a loop over dealt batches before its end: its step is nobody else's."""
        return self._dealt.has_left

    def leave(self) -> None:
        """The training function is over, and so is a loop over dealt batches, if one is still held open."""
        self._dealt.leave()

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where replicas have left a loop over dealt batches, each at a step of its own."""
        self._dealt.require_common_step(what)

    def catch_up(self) -> None:
        """Where batches are dealt: have the same weights as all others; all must call it, in an operation."""
        if self._takes_turns:
            self._dealt.catch_up()

    def _rebalance(self) -> None:
        """Where a look is due, compare what a micro-batch takes each worker, and deal them anew if that gains."""
        if not self._came_by(self._balance.is_due) or self.step == self._balanced_at:
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
        is_due = self._files.is_save_due
        is_saved = is_due(self.step) if self._takes_turns else self._came_by(is_due)  # after this very step
        prepared = self._prepared
        is_newer = prepared.is_recalled or prepared.has_taken_over or self.step > prepared.step
        if self._files.saves_at_end and not self.is_stopped and not self._takes_turns:
            self._agreement.run(prepared.wait)
        if self._files.saves_at_end and not self.is_stopped and is_newer and not is_saved:
            self.save()
        self.is_stopped = True

    def save(self, gathered: GatheredCodecState | None = None, *, is_writer: bool = False) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background.

        All workers must call it; within an operation of all of them, with what they have `gathered` there. `is_writer`:
        this one alone calls it, since it is to write.
        """

        def gather() -> GatheredCodecState:
            return self._memories.gather(keeps=is_writer or self._prepared.writes)  # who that is may change meanwhile

        self.end_round()
        if self.is_dealing:  # nobody has a batch in hand
            self._dealt.stand()
        self.walks.shards.close()
        self._recorder.begin("saving", self.step)
        self._numerical_guard.put_back(self.step, self.cursors)
        self.saved_at_step = self.step
        if gathered is None:
            gathered = self._agreement.run(gather) if self._memories.is_kept else GatheredCodecState()
        if is_writer and self._agreement.has_changed:
            self._prepared.has_taken_over = True
        self._prepared.save(step=self.step, cursors=self.cursors, gathered=gathered, is_writer=is_writer)

    # One step.

    def walk(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
        pipelined: PipelinePass | None = None,
    ) -> StepOutcome:
        """Walk over a batch for a stepper; returns what all workers agreed on. `pipelined`: through stages."""

        def run() -> Iterator[Any]:
            if pipelined is not None:
                return self.walks.run_pipeline(batch, gradients, pipelined, is_finite=is_finite)
            return self.walks.run(batch, gradients, is_finite=is_finite)

        for micro in self._timed_walk(batch, gradients, run, names_unused=True):
            self.walks.backward(loss_of(micro))
        return cast("StepOutcome", self.walks.outcome)

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
        if isinstance(self._plan.sync, ParameterServer):
            raise RuntimeError(
                "a plain loop over a batch under ParameterServer(...): optimizers run on the servers, so optim.step() "
                "has nothing to do here. Write: step = worker.stepper(model, optim, loss), and in the loop over "
                "batches: loss = step(batch)"
            )
        if self._rounds.is_local and self._agreement.elastic is not None:
            raise RuntimeError(
                f"a plain loop over a batch under {self._plan.sync!r}, with replicas that come and go: "
                "what a lost replica should have run, the others run at the next agreement, and only a stepper can be "
                "asked to. Write: step = worker.stepper(model, optim, loss), and in the loop over batches: "
                "loss = step(batch)"
            )
        gradients = self._models.sum_over(models)
        return self._timed_walk(
            batch, gradients, lambda: self.walks.run(batch, gradients), names_unused=len(models) == 1
        )

    def _timed_walk(
        self, batch: StepBatch, gradients: GradientReducer, run: Callable[[], Iterator[Any]], *, names_unused: bool
    ) -> Iterator[Any]:
        """Walk by `run`, again where a member was lost meanwhile, and book what it took."""
        self._begin_round()
        stream = self.streams[batch.stream]
        if stream.is_dealt_anew and not self._takes_turns:  # a member was lost in what the loop does before its step
            stream.redeal(batch)
        step = self.books.begin_pass(batch)
        if batch.num_passes == 0:
            self._unsettled.clear()
        self._recorder.begin("forward and backward", batch.step)
        began, data_s = time.perf_counter(), batch.data_s
        while True:
            try:
                yield from run()
                break
            except Disrupted as disruption:
                if self._agreement.elastic is None:
                    raise
                if not isinstance(disruption, StepInvalidated):
                    self._agreement.drop(disruption)
            # The same step comes again, with new shares: its samples, and so its gradient, are the same.
            if batch.num_passes == 0:
                self._agreement.hold()
            self._agreement.recovery_s += time.perf_counter() - began - (batch.data_s - data_s)
            self.streams[batch.stream].redeal(batch)
            began, data_s = time.perf_counter(), batch.data_s
        outcome = cast("StepOutcome", self.walks.outcome)
        self._landed = gradients
        if outcome.is_taken:
            self._unsettled.append(gradients)
        step.compute_s += time.perf_counter() - began - outcome.communication_s - (batch.data_s - data_s)
        self._recorder.begin("optimizer and the loop's code", batch.step)
        self._balance.note(time.perf_counter() - began - outcome.communication_s, len(batch))
        if self.walks.broken:
            self._numerical_guard.broken(batch, self.walks.broken, self.cursors[batch.stream].of)
        if self.walks.nonfinite_gradients:
            self._numerical_guard.broken_gradients(batch.step, self.walks.nonfinite_gradients)
        if outcome.spike is not None:
            self._numerical_guard.spiked(batch.step, outcome.spike)
        self.books.end_pass(step, outcome, names_unused=names_unused)

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

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Meanwhile a stepper calls prepared optimizers, and commits when all have stepped."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def commit(self, batch: StepBatch, *, by: StepTaker | None = None) -> None:
        """End the transaction of a batch, taken by a stepper; without one it was a prepared optimizer in the plain
        loop."""
        if self._takes_turns:
            self._models.turns.pass_over()  # before it is in the ledger: nobody else takes it then
            batch.behind = self._models.turns.behind
        self.books.commit(batch)
        for gradients in self._unsettled:
            gradients.settle()
        self._unsettled.clear()
        self._agreement.committed()
        if by is not None and self._rounds.is_open:
            self._takers.setdefault(batch.step, []).append(by)

    # Rounds of steps that replicas take by themselves.

    def _follow_steps(self) -> None:
        """Do what is due after the steps that were taken, since the user's code has done with them: before, another
        optimizer may step."""
        rounds = self._rounds
        rounds.stand = LoopPoint.FOLLOWING
        rounds.advance()
        if rounds.is_over(self._files.is_save_due):
            self._try_to_end_round()
        elif rounds.is_mixing_due(self.step):
            self._try_to_end_round(is_wanted=False)
        rounds.followed()

    def _end_last_round(self, ended: BatchStream | None = None) -> None:
        """No more steps come: end the round, and do what has waited for its end. `ended`: the stream that has no more
        data."""
        was_open = self._rounds.is_open
        self._try_to_end_round()
        if ended is not None and self._rounds.is_local and not ended.num_samples:
            self._rounds.end_of_data(self.step)
        self._rounds.require_nobody_ahead(self.step)
        if was_open:
            self._recorder.begin("between two steps", self.step)
            self._after_step()

    def end_round(self, *, is_wanted: bool = True) -> None:
        """Have the replicas agree, where they have taken steps by themselves and one of them wants to; all must come to
        it at the same place. Raises SyncError where another has gone past that: what is done next, a save say, would be
        this replica's alone."""
        self._try_to_end_round(is_wanted=is_wanted)
        self._rounds.require_nobody_ahead(self.step)

    def _try_to_end_round(self, *, is_wanted: bool = True) -> None:
        """The same, where others may be further: then this replica has to go on."""
        if not self._rounds.is_open:
            return
        if is_wanted:
            self._recorder.begin("the replicas agree", self.step)
        if not self._rounds.end(self.step, run_more=self._run_more, is_wanted=is_wanted):
            return
        self._files.ledger.settle()
        self._takers.clear()
        if self._is_deal_due and not self._rounds.is_left_behind:  # else with those who are in the next round, after it
            self._deal_anew()

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Have the mean of all replicas' weights in the models meanwhile; all must call it, in an operation."""
        return self._rounds.averaged()

    def _begin_round(self) -> None:
        """Have replicas agree, from now on, on all that is trained. Where optimizers were given more within a round, it
        ends before that has moved, here, on all replicas alike."""
        if not self._rounds.is_local:
            return
        if self._rounds.is_open:
            new = self._rounds.lacks(self._prepared.trained())
            if not new:
                return
            here = [local_part(parameter) for parameter in new if not parameter.is_meta]
            before = [part.clone() for part in here]
            self.end_round()
            for part, values in zip(here, before, strict=True):  # it was moved by what lost members should have run
                part.copy_(values)
        self._follow_trained()
        self._rounds.begin()

    def _follow_trained(self) -> None:
        """Have replicas agree on everything that prepared optimizers train."""
        agreeing = self._rounds.prepare(self._prepared.trained())
        if agreeing:
            self._prepared.agreeing(agreeing)

    def _run_more(self, portion: RoundShare) -> None:
        """Take a step of this replica on micro-batches that a lost member should have run."""
        batch, each = portion.batch, self._axes.micro_batch_peers.size
        share = deal_to_replicas(len(portion.micros), replicas=1, each=each)[self._place_abreast]
        read = portion.micros[share.reads.start : share.reads.stop]
        items = self.streams[batch.stream].read(batch, read)
        more = batch.part(
            portion.micros[share.own.start : share.own.stop],
            num_runs=share.num_runs,
            spare=None if share.spare is None else portion.micros[share.spare],
            num_here=portion.num_samples,
            fetch=lambda: next(items),
        )
        self._recorder.begin("forward and backward", portion.step)
        with self.stepping():
            for one in self._takers.get(portion.step, ()):
                one.run_more(more)
        self._files.ledger.ran_more(portion.step, more.micros if self._axes.counts else ())

    @property
    def _place_abreast(self) -> int:
        """This worker's among those of its replica who run different micro-batches."""
        return self._axes.share_of(self._group)[0] % self._axes.micro_batch_peers.size

    def extra_pass(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
        pipelined: PipelinePass | None = None,
    ) -> StepOutcome:
        """Walk over what is in no book: a part of a batch that another replica should have walked over."""
        if pipelined is not None:
            self.walks.run_pipeline(batch, gradients, pipelined, is_finite=is_finite)
        else:
            for micro in self.walks.run(batch, gradients, is_finite=is_finite):
                self.walks.backward(loss_of(micro))
        self._landed = gradients
        return cast("StepOutcome", self.walks.outcome)

    def follow(self, optimizer: Optimizer) -> None:
        """A prepared optimizer's `step()` ends the transaction in plain loops, and is refused where it comes too
        early."""
        self._models.check(optimizer)
        if isinstance(self._plan.sync, ParameterServer):
            return  # it steps on the servers
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
        if step is None or step.batch.num_passes == 0:
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
        if not (self._is_stepping and self._rounds.is_open):  # which has looked when it walked
            self._begin_round()  # where this batch's was ended in between
        if self._landed is not None:
            self._landed.check_unchanged()
        if self._files.capture is not None:
            names = self._prepared.registry.parameter_names()
            parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
            self._files.capture.gradients(step.batch.step, parameters, self._models.whole)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.books.latest is not None and not self._is_stepping:
            self.commit(self.books.latest.batch)

    # When the members are others.

    def members_changed(self) -> None:
        """Forget what was made for the old ones."""
        self._models.members_changed()
        self._rounds.members_changed()
        # Until a round is over all run what they were dealt, and then what others lost. Who is behind, in what the loop
        # does before its first step, has its batch in hand as the others had it dealt who have taken that step.
        is_begun = self._rounds.is_open or self._agreement.is_behind
        self._is_deal_due = self._rounds.is_local and is_begun
        if not self._is_deal_due:
            self._deal_anew()

    def _deal_anew(self) -> None:
        """Deal the steps that come to the members of now."""
        self._is_deal_due = False
        for stream in self.streams.values():
            stream.members_changed()
        self._balance.forget()

    def plain(self) -> dict[str, Any]:
        """The counts, for a newcomer."""
        return {
            "books": self.books.plain(),
            "balanced_at": self._balanced_at,
            "equal": (self._equal_before, self._equal_at),
        }

    def fill(self, state: dict[str, Any]) -> None:
        """Count on from a member's counts."""
        self.books.fill(state["books"])
        self.saved_at_step, self._balanced_at = self.books.step, state["balanced_at"]
        self._equal_before, self._equal_at = state["equal"]

    def begin_at(self, step: int) -> None:
        """The run goes on from a checkpoint."""
        self.books.step = self.saved_at_step = self._equal_before = self._equal_at = step
        self._numerical_guard.begin(step)
        self._memory_checkpointer.begin(step)


def _staleness_bound(plan: Plan) -> dict[str, int]:
    """For the ledger: by how many others an update may be behind, where the plan says so."""
    bound = plan.sync.staleness if isinstance(plan.sync, ParameterServer) else None
    return {"staleness": bound} if bound else {}
