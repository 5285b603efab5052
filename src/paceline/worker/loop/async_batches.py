"""The loop over batches that servers hand out: each replica asks for the next one, and none waits for a common step.

A replica takes whole batches, or shares of them where the slowest are left out. The servers hand out batches, and say
when all have to pause, when one is to save, and when the stream is over. Meanwhile members are apart: none of them
knows a step that it shares with the others, except at the places where no replica has a batch in hand.

A replica may leave a loop before its end, and the others take what is left of it. From then on it is at a step of its
own, so there are no further loops, and it saves nothing. It has the newest weights of that moment, and gets those that
all have in the end as soon as they do something together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.schedule.backup_workers import AsyncShares, BackupShare
from paceline.schedule.staleness_clock import AsyncBatch, AsyncStream, Pause, Save, StreamEnd
from paceline.sync.parameter_server.client import starting_turn
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.loop.step_log import StepLog
from paceline.worker.parts import WorkerParts

if TYPE_CHECKING:
    from paceline.sync.parameter_server.async_updates import AsyncGradients

__all__ = ["AsyncBatches"]


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenStream:
    """The stream whose batches are handed out, and where its loop began."""

    stream: BatchStream
    first_step: int
    begun: StreamPosition

    def batch(self, number: int, *, share: tuple[int, int] = (0, 1)) -> StepBatch:
        """The batch of this number since the loop began, or one share of so many of it."""
        return self.stream.batch_at(number, begun=self.begun, step=self.first_step + number + 1, share=share)


class AsyncBatches:
    """The batches of one stream after the other that this worker is given."""

    def __init__(
        self,
        parts: WorkerParts,
        *,
        step_log: StepLog,
        save: Callable[[], None],
        stop: Callable[[], None],
        forget: Callable[[str], Any],
    ) -> None:
        """`save()` writes a checkpoint on this worker, which the servers have chosen for it. `stop()` ends the run at
        its last step. `forget(name)`: no worker knows the position of this stream any more."""
        self._plan, self._everybody = parts.plan, parts.place.group
        self._consensus, self._recorder = parts.place.consensus, parts.place.recorder
        self._models, self._step_log, self._files = parts.models, step_log, parts.files
        self._save, self._stop, self._forget = save, stop, forget
        self._under_way: _OpenStream | None = None
        self.has_left = False  # this replica, a loop before its end
        self._have_others_left = False  # as far as it is known
        self._is_behind = False  # others may have taken steps since this replica has left

    @property
    def is_under_way(self) -> bool:
        """Whether the loop over one of them is."""
        return self._under_way is not None

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where this replica has left a loop before its end, or knows that another one has."""
        if self.has_left or self._have_others_left:
            replica = "this replica" if self.has_left else "another replica"
            raise RuntimeError(
                f"{what} was called after {replica} had left a loop over batches before its end (break, return, or an "
                "error that was caught): under ParameterServer(staleness=...) or (drop=...) each leaves at a step of "
                "its own, and the others take what is left, so there is no step that all could go on from. End loops "
                "by epochs=n or max_steps, have none after one that is left, or use staleness=0 and drop=0"
            )

    def catch_up(self) -> None:
        """Where this replica has left a loop, get the weights that the last ones in it have made; all must call it, in
        an operation."""
        self._everybody.barrier()  # until it is over, another replica may be in the loop
        if self._is_behind:
            self._models.reducers.async_gradients.refresh()
            self._is_behind = False

    def leave(self) -> None:
        """This replica takes no more batches of the loop under way, if there is one, and has the weights of now."""
        if self._under_way is None:
            return
        name, gradients = self._under_way.stream.source.name, self._models.reducers.async_gradients
        is_taken = self._step_log.is_committed(name)  # else weights are as new as the batch, or an error is on its way
        self._under_way, self.has_left, self._is_behind = None, True, True
        self._step_log.leave(name)
        self._forget(name)  # there is no step that all replicas share: nothing is saved
        if is_taken:
            gradients.recorded()
        gradients.leave(is_broken=not is_taken)
        if is_taken:
            gradients.refresh()

    def count_done(self) -> None:
        """Count all batches as done that are, at a place where no replica has one in hand."""
        self._count_done(self._models.reducers.async_gradients.stand())

    def batches(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the batches of a stream that this worker is given, until none is left for any replica.

        Raises RuntimeError inside of a loop over another stream.
        """
        if self._under_way is not None:
            raise RuntimeError(
                f"the loop over {stream.source.name!r} began inside of the one over "
                f"{self._under_way.stream.source.name!r}: under ParameterServer(staleness=...) or (drop=...) batches "
                "are handed out of one stream at a time, so that there are places where no replica has one in hand. "
                "Have one loop after the other, or use staleness=0 and drop=0"
            )
        gradients = self._models.reducers.async_gradients
        order = self._begin(stream, gradients)
        if order is None:
            return
        self._under_way = _OpenStream(stream, order.step, StreamPosition(order.epoch, order.position))
        try:
            yield from self._take(self._under_way, gradients, order)
        except (GeneratorExit, KeyboardInterrupt):  # code that catches it goes on behind the loop
            self.leave()
            raise

    def _take(self, under_way: _OpenStream, gradients: AsyncGradients, order: AsyncStream) -> Iterator[StepBatch]:
        """Yield what this worker is given, and do what comes between."""
        while True:
            self._recorder.begin("waiting for a batch", self._step_log.step)
            self._consensus.await_enough()
            answer = gradients.next(
                order, wants_pause=lambda: self._consensus.wants_change, is_called=lambda: self._consensus.is_dismissed
            )
            self._note_pending_commits(under_way, gradients)
            match answer:
                case AsyncBatch(number=number):
                    batch = under_way.batch(number)
                case BackupShare(number=number, index=index, count=count):
                    batch = under_way.batch(number, share=(index, count))
                case Save(number=number):
                    self._save()
                    gradients.saved(number)
                    continue
                case Pause(number=number):  # all workers are asked to
                    self._pause(number)
                    continue
                case StreamEnd(has_left=has_left):
                    self._have_others_left |= has_left
                    self._end(order.limit)
                    return
                case None:
                    self._consensus.depart()
            self._step_log.step = batch.step - 1
            self._step_log.open(batch, StreamPosition())
            gradients.behind, gradients.num_samples = None, sum(micro.num_samples for micro in batch.micros)
            yield batch
            self._close(batch, gradients)

    def _close(self, batch: StepBatch, gradients: AsyncGradients) -> None:
        """The loop asks for the next batch: report this one, if it was taken."""
        name = batch.stream
        if self._plan.has_backup_workers and batch.chosen is None:  # passed over: no worker has waited for it
            self._step_log.leave(name)
            return
        if gradients.is_sent and not self._step_log.is_committed(name):  # an error was caught in the loop
            self._step_log.leave(name)
            gradients.give_back()
            return
        gradients.pass_over()
        if gradients.behind is not None:
            self._step_log.report({"behind": gradients.behind})
        self._step_log.close(name)
        gradients.recorded()

    def _pause(self, number: int) -> None:
        """All batches before this number are done, and no worker has one in hand: do what is due between two steps."""
        self._count_done(number)
        self._recorder.begin("between two steps", self._step_log.step)
        self._consensus.rejoin_group()
        self._consensus.change_is_due()
        self._consensus.between_steps()
        self._consensus.detach()

    def _end(self, limit: int) -> None:
        """The stream is over for all workers, after so many batches."""
        self._count_done(limit)
        self._recorder.begin("between two steps", self._step_log.step)
        self._consensus.rejoin_group()
        self._under_way = None
        if self._files.is_last_step(self._step_log.step):
            self._stop()

    def _begin(self, stream: BatchStream, gradients: AsyncGradients) -> AsyncStream | None:
        """Reach the servers; returns what they hand out, which they also tell each newcomer. None: that is over, and
        the others are in a later loop, or at the end. From then on members are apart."""
        if self._consensus.is_newcomer:
            return self._join(stream, gradients)
        first, limit, files = self._step_log.step, stream.num_left(), self._files
        if files.max_steps is not None:
            limit = max(0, min(limit, files.max_steps - first))
        every = files.save_every
        saves = (limit + 1, limit + 1, 1) if every is None else (every - first % every, limit + 1, every)
        self._consensus.run(lambda: gradients.meet(index=starting_turn(self._everybody), size=self._everybody.size))
        self._consensus.detach()
        begun = StreamPosition(stream.cursor.epoch, stream.cursor.position)
        order = AsyncStream(
            stream=stream.source.name,
            limit=limit,
            workers=self._consensus.ranks,
            saves=saves,
            step=first,
            epoch=begun.epoch,
            position=begun.position,
        )
        if self._plan.has_backup_workers:
            epochs, micros = stream.steps_of_epochs(begun), stream.num_micros(begun)
            order = AsyncShares(**order.plain(), epochs=epochs, micros=micros)
        return order

    def _join(self, stream: BatchStream, gradients: AsyncGradients) -> AsyncStream | None:
        """The same, for a newcomer: the servers know what the others take."""
        self._consensus.detach()
        order, is_over = gradients.join(stream.source.name)
        if not is_over:
            self._consensus.join_detached()
            return order
        self._step_log.step = order.step + order.limit
        stream.stand_after(order.limit, begun=StreamPosition(order.epoch, order.position))
        if self._files.is_last_step(self._step_log.step):
            self._consensus.await_run_end()
        return None

    def _note_pending_commits(self, under_way: _OpenStream, gradients: AsyncGradients) -> None:
        """Note the batches that count, and may be in the ledger of a lost worker alone, or in none."""
        for one in gradients.pending_commits:
            if one.stream != under_way.stream.source.name:
                continue  # a newcomer hears of earlier ones, too
            batch = under_way.batch(one.number)
            if self._plan.has_backup_workers:  # all have passed it over: no worker has counted it
                self._step_log.step, batch.chosen = batch.step - 1, ()
                self._step_log.open(batch, StreamPosition())
                self._step_log.close(batch.stream)
                continue
            self._files.ledger.committed(batch, (), step=batch.step, skipped=one.is_skipped, is_whole=True)
        if gradients.pending_commits:
            gradients.pending_commits.clear()
            gradients.recorded()

    def _count_done(self, number: int) -> None:
        """All batches before this number are done, and their updates are here."""
        if self._under_way is not None:
            self._step_log.step = self._under_way.first_step + number
            self._under_way.stream.stand_after(number, begun=self._under_way.begun)
