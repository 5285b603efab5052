"""What is due between two steps: changes of the members, new shares, snapshots and checkpoints.

All workers come to these places in the same order, and have equal weights there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline import environment
from paceline.comm.group import total
from paceline.events import MicroBatchHalved, Note
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.load_balancing import LoadBalancer
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition, StreamPositions
from paceline.worker.loop.micro_batch_trial import MicroBatchTrial
from paceline.worker.loop.save_timer import SaveTimer
from paceline.worker.loop.step_log import StepLog
from paceline.worker.loop.wire_advisor import WireAdvisor
from paceline.worker.parts import WorkerParts
from paceline.worker.state.codec_state import GatheredCodecState

__all__ = ["BetweenSteps"]


class BetweenSteps:
    """One worker's streams, and what is done with them and with its state between two steps."""

    def __init__(self, parts: WorkerParts, log: StepLog) -> None:
        place, files = parts.scope.place, parts.files
        self.log, self.streams = log, dict[str, BatchStream]()
        self.positions = StreamPositions(lambda: self.cursors)
        self.saved_at_step = -1
        self.is_stopped = False  # by max_steps
        self._sizes, self._files, self._shards = parts.sizes, files, parts.executor.shards
        self._sizes.changed, self._halves = self._cut_again, parts.executor.shortage.halves
        self._resumed, self._saver, self._codec_state = parts.resumed, parts.saver, parts.codec_state
        self._numerical_guard, self._memory_checkpointer = parts.numerical_guard, parts.memory_checkpointer
        self._wire_advisor = WireAdvisor(parts.plan, place=place, models=parts.models, emit=files.emit)
        self._group, self._consensus, self._recorder = place.group, place.consensus, place.recorder
        self._device = parts.device
        self._is_split, self._is_local = place.axes.is_split, parts.plan.is_local
        self._trial = MicroBatchTrial(parts.sizes, environment.micro_batch_trial())
        # The steps after which all had equal weights the last time, and the time before: but for rounds, the last two.
        self._equal_before = self._equal_at = 0
        self.save_timer = SaveTimer(files.save_every_s)
        self.balance, self._balanced_at = LoadBalancer(is_on=files.balances and not place.axes.is_split), -1
        if files.balances and place.axes.is_split and place.group.index == 0:
            files.emit(Note(text="balance is not used: the workers of a replica run in step with each other"))

    @property
    def cursors(self) -> dict[str, StreamPosition]:
        """The position of each stream."""
        return {name: stream.cursor for name, stream in self.streams.items()}

    def hand_out(
        self, stream: BatchStream, batch: StepBatch, *, follow: Callable[[], None] | None = None
    ) -> Iterator[StepBatch]:
        """Yield one batch to the user's loop, and write down what became of it. `follow()` is called when the loop asks
        for the next one: nothing steps on this one any more."""
        name = stream.source.name
        self.log.open(batch, stream.cursor)
        try:
            yield batch
        except GeneratorExit:
            # The user left the loop, by `break` or by an error on its way: what was not committed did not happen.
            self.log.leave(name)
            self._numerical_guard.settle(self.log.step, self.cursors)
            raise
        self.log.end(name)
        if follow is not None:
            follow()
        self.log.close(name)
        if self.log.last_done is not None:
            self._wire_advisor.note(self.log.last_done)
        self._numerical_guard.settle(self.log.step, self.cursors)

    def before_step(self) -> None:
        """What is due where all have equal weights."""
        self._trial.before_step(self.log.step)
        self.save_timer.begin()
        self._shards.close()  # the script may have run forwards between the steps
        self._consensus.between_steps()
        self._rebalance()
        is_kept = self._numerical_guard.keep(self.log.step, self.cursors)
        self._memory_checkpointer.keep(self.log.step, is_rollback_kept=is_kept)
        step = self.log.step
        if step > self._equal_at:
            self._equal_before, self._equal_at = self._equal_at, step

    def after_step(self) -> None:
        """The same, of what belongs to the step that was taken."""
        is_save_due = self._came_by(self._files.is_save_due)
        self._numerical_guard.compare(self.log.step, is_save_due=is_save_due)
        if is_save_due:
            self._consensus.run(self._saver.wait)  # else the writer might wait alone, and the others in a step
        if is_save_due and self.saved_at_step != self.log.step:
            self.save()
        elif self._files.saves_regularly or self.save_timer.is_near:
            self._saver.warm()

    def _came_by(self, is_due: Callable[[int], bool]) -> bool:
        """Whether something was due at one of the steps since all had equal weights the last time before now."""
        step = self.log.step
        since = self._equal_at if step > self._equal_at else self._equal_before
        return any(is_due(one) for one in range(since + 1, step + 1))

    def _rebalance(self) -> None:
        """Where a look is due, compare the workers' time for a micro-batch, and change the shares if that gains."""
        step = self.log.step
        if not self._came_by(self.balance.is_due) or step == self._balanced_at:
            return
        self._balanced_at = step
        measured, num_micro = self.balance.measured(), self._sizes.batch.num_micro
        seconds = self._consensus.run(lambda: self._group.gather_objects(measured))
        if len(seconds) != self._group.size or not self.balance.agree(seconds, num_micro):
            return
        for stream in self.streams.values():
            stream.members_changed()
        if self._group.index == 0:
            counts = [len(share) for share in self.balance.shares(num_micro, len(seconds))]
            took = ", ".join(f"{one * 1e3:.3g}" for one in seconds)
            text = (
                f"after step {self.log.step} the workers run {counts} of a step's micro-batches each, by how long one "
                f"has taken them: {took} ms"
            )
            self._files.emit(Note(text=text))

    def refresh_share(self, batch: StepBatch) -> None:
        """Give this worker its present share of a batch, where the members have changed since it was handed out."""
        stream = self.streams[batch.stream]
        if stream.needs_reassignment:
            stream.reassign(batch)

    def halve_micro_batches(self, step: int, shortage: str) -> None:
        """A step has run out of memory: from now on micro-batches have half as many samples, and the step comes again.

        An operation of all workers; `shortage`: the error of this one, "" where it had enough.
        """
        before = self._sizes.samples
        own = self._consensus.rank, shortage
        told = self._consensus.run(lambda: self._group.gather_objects(own))
        self._sizes.halve()
        gc.collect()  # what is freed only now would be missing again
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        short = [(rank, text) for rank, text in told if text]
        self.tell_micro_batch()
        if self._group.index == 0:
            self._files.emit(
                MicroBatchHalved(
                    step=step,
                    workers=[rank for rank, _ in short],
                    message=next((text for _, text in short), ""),
                    before=before,
                    after=self._sizes.samples,
                )
            )

    def tell_micro_batch(self) -> None:
        """Tell the coordinator the size of micro-batches, where it may be halved."""
        if self._group.index == 0 and self._halves:
            self._consensus.tell_micro_batch(self._sizes.samples)

    def _cut_again(self) -> None:
        for stream in self.streams.values():
            stream.cut_again()
        self.balance.forget()

    def share_anew(self) -> None:
        """Share the steps that come among the present members."""
        for stream in self.streams.values():
            stream.members_changed()
        self.balance.forget()

    def end_of_data(self) -> None:
        """A loop has had all its batches. What comes after it may fail, an evaluation for example: save before, where
        that takes little of the time. The first worker's clock decides, and whether it has saved this step, perhaps
        alone. An operation of all workers."""
        if not self._files.saves_at_end:
            return
        is_worth = self._group.index == 0 and self.saved_at_step < self.log.step and self.save_timer.is_worth

        def agree() -> bool:
            is_wanted = total(self._group, [float(is_worth)], what="whether the end of a loop is saved")[0] > 0
            if is_wanted:
                self._saver.wait()
            return is_wanted

        if self._consensus.run(agree):
            self.save()

    def stop(self, *, is_saved: bool | None = None, awaits_save: bool = True) -> None:
        """End a loop at max_steps, and save the state of now, which a later start goes on from. Code after the loop
        runs there too, in its time, so what it does today is not saved at the end.

        `is_saved`: this step was saved already; None: as saves were due since all had equal weights. `awaits_save`: all
        workers wait for an earlier save together.
        """
        if is_saved is None:
            is_saved = self._came_by(self._files.is_save_due)
        resumed, saver = self._resumed, self._saver
        is_newer = resumed.is_recalled or saver.has_taken_over or self.log.step > resumed.step
        if self._files.saves_at_end and not self.is_stopped and awaits_save:
            self._consensus.run(saver.wait)
        if self._files.saves_at_end and not self.is_stopped and is_newer and not is_saved:
            self.save()
        self.is_stopped = True

    def save(self, gathered: GatheredCodecState | None = None, *, is_writer: bool = False) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background.

        All workers must call it; within an operation of all of them, with what they have `gathered` there. `is_writer`:
        this one alone calls it, since it is to write.
        """

        def gather() -> GatheredCodecState:
            return self._codec_state.gather(keeps=is_writer or self._saver.writes)  # the writer may change meanwhile

        step, began = self.log.step, time.monotonic()
        self._shards.close()
        self._recorder.begin("saving", step)
        self._numerical_guard.put_back(step, self.cursors)
        self.saved_at_step = step
        if gathered is None:
            gathered = self._consensus.run(gather) if self._codec_state.is_kept else GatheredCodecState()
        if is_writer and self._consensus.has_changed:
            self._saver.has_taken_over = True
        self._saver.save(step=self.log.step, gathered=gathered, is_writer=is_writer)
        self.save_timer.saved(time.monotonic() - began)

    @property
    def has_whole_models(self) -> bool:
        """Whether each worker has the run's weights between two steps."""
        return not (self._is_split or self._is_local)

    @property
    def can_save_alone(self) -> bool:
        """Whether the first worker has all of the state between two steps, so that it needs no other to save it."""
        return self.has_whole_models and not self._codec_state.is_kept

    def save_alone(self, then: Callable[[], None]) -> bool:
        """Save a checkpoint on the first worker, which alone calls this where `can_save_alone`, and call `then()` in
        another thread once it is complete. Returns whether that is done: where it takes long, it goes on meanwhile.
        Raises CheckpointError where it cannot be written."""
        step, began = self.log.step, time.monotonic()
        self._shards.close()
        self._recorder.begin("saving", step)
        self._numerical_guard.put_back(step, self.cursors)
        self.saved_at_step = (
            step  # where one is due after this step the others save, too: nothing, as they do not write
        )
        is_done = self._saver.save_alone(step=step, then=then)
        self.save_timer.saved(time.monotonic() - began)
        return is_done

    def state_dict(self) -> dict[str, Any]:
        """The counts, for a newcomer."""
        return {
            "step_log": self.log.state_dict(),
            "balanced_at": self._balanced_at,
            "equal": (self._equal_before, self._equal_at),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from a member's counts."""
        self.log.load_state_dict(state["step_log"])
        self.saved_at_step, self._balanced_at = self.log.step, state["balanced_at"]
        self._equal_before, self._equal_at = state["equal"]

    def begin_at(self, step: int) -> None:
        """The run goes on from a checkpoint."""
        self.log.begin_at(step)
        self.saved_at_step = self._equal_before = self._equal_at = step
        self._numerical_guard.begin(step)
        self._memory_checkpointer.begin(step)
