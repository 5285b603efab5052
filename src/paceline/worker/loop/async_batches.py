"""The loop over batches that are dealt to whoever asks, where nobody waits for a common step.

Each replica takes whole batches, or shares of them where the slowest are left out. The servers deal, and say when all
have to pause, when one is to save, and when it is over. Meanwhile members are apart: none of them knows a step that it
shares with the others, but for the places where nobody has a batch in hand.

A replica may leave a loop before its end, and the others take what is left of it. It stands at a step of its own from
then on, so there are no further loops, and it saves nothing. It has the newest weights of that moment, and those that
all have in the end as soon as they do something together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.comm.group import WorkerGroup
from paceline.plan import Plan
from paceline.schedule.backup_workers import BackupShare, DealtShares
from paceline.schedule.staleness_clock import DealtBatch, DealtStream, Pause, Save, StreamEnd
from paceline.sync.parameter_server.client import starting_turn
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.loop.step_log import StepLog
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.prepared_models import PreparedModels

if TYPE_CHECKING:
    from paceline.sync.parameter_server.async_updates import AsyncGradients

__all__ = ["AsyncBatches"]


class AsyncBatches:
    """What a worker is dealt of one stream after the other. `save`: as the one who is to write; `stop`: the run ends
    here, at its last step; `forget`: nobody knows where a stream of this name stands."""

    def __init__(
        self,
        plan: Plan,
        *,
        place: WorkerContext,
        everybody: WorkerGroup,
        models: PreparedModels,
        step_log: StepLog,
        files: RunFiles,
        save: Callable[[], None],
        stop: Callable[[], None],
        forget: Callable[[str], Any],
    ) -> None:
        self._plan, self._everybody = plan, everybody
        self._agreement, self._recorder = place.agreement, place.recorder
        self._models, self._step_log, self._files = models, step_log, files
        self._save, self._stop, self._forget = save, stop, forget
        self._turn_of: tuple[BatchStream, int, StreamPosition] | None = (
            None  # whose batches are dealt, and where it began
        )
        self.has_left = False  # this replica, a loop before its end
        self._have_others_left = False  # as far as it is known
        self._is_behind = False  # others may have taken steps since this replica has left

    @property
    def is_dealing(self) -> bool:
        """Whether the loop over one of them is under way."""
        return self._turn_of is not None

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where this replica has left a loop before its end, or knows that another one has."""
        if self.has_left or self._have_others_left:
            who = "this replica" if self.has_left else "another replica"
            raise RuntimeError(
                f"{what} was called after {who} had left a loop over batches before its end (break, return, or an "
                "error that was caught): under ParameterServer(staleness=...) or (drop=...) each leaves at a step of "
                "its own, and the others take what is left, so there is no step that all could go on from. End loops "
                "by epochs=n or max_steps, have none after one that is left, or use staleness=0 and drop=0"
            )

    def catch_up(self) -> None:
        """Where this replica has left a loop, have the weights that the last ones in it have made; all must call it, in
        an operation."""
        self._everybody.barrier()  # until it is over, somebody may be in the loop
        if self._is_behind:
            self._models.reducers.async_gradients.refresh()
            self._is_behind = False

    def leave(self) -> None:
        """This replica takes no more batches of the loop under way, if there is one, and has the weights of now."""
        if self._turn_of is None:
            return
        name, gradients = self._turn_of[0].source.name, self._models.reducers.async_gradients
        is_taken = self._step_log.is_committed(name)  # else weights are as new as the batch, or an error is on its way
        self._turn_of, self.has_left, self._is_behind = None, True, True
        self._step_log.leave(name)
        self._forget(name)  # nobody knows a step at which all stand: nothing is saved
        if is_taken:
            gradients.noted()
        gradients.leave(is_broken=not is_taken)
        if is_taken:
            gradients.refresh()

    def stand(self) -> None:
        """Count as done all batches that are, where nobody has one in hand."""
        self._stand(self._models.reducers.async_gradients.stand())

    def batches(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the batches of a stream that this worker is dealt, until there are no more for anybody.

        Raises RuntimeError inside of a loop over another stream.
        """
        if self._turn_of is not None:
            raise RuntimeError(
                f"the loop over {stream.source.name!r} began inside of the one over {self._turn_of[0].source.name!r}: "
                "under ParameterServer(staleness=...) or (drop=...) batches are dealt of one stream at a time, so that "
                "there are places where nobody has one in hand. Have one loop after the other, or use staleness=0 and "
                "drop=0"
            )
        gradients = self._models.reducers.async_gradients
        dealt = self._begin(stream, gradients)
        if dealt is None:
            return
        begun = StreamPosition(dealt.epoch, dealt.position)
        self._turn_of = stream, dealt.step, begun
        try:
            yield from self._take(stream, gradients, dealt, begun=begun)
        except (GeneratorExit, KeyboardInterrupt):  # whoever catches it goes on behind the loop
            self.leave()
            raise

    def _take(
        self, stream: BatchStream, gradients: AsyncGradients, dealt: DealtStream, *, begun: StreamPosition
    ) -> Iterator[StepBatch]:
        """Yield what this worker is dealt, and do what comes between."""
        name, first, agreement = stream.source.name, dealt.step, self._agreement
        while True:
            self._recorder.begin("waiting for a batch", self._step_log.step)
            agreement.await_enough()
            told = gradients.next(
                dealt, wants_pause=lambda: agreement.wants_change, is_called=lambda: agreement.is_dismissed
            )
            self._note_bequests(stream, gradients, begun=begun, first=first)
            match told:
                case DealtBatch(number=number):
                    self._step_log.step = first + number
                    batch = stream.batch_at(number, begun=begun, step=first + number + 1)
                case BackupShare(number=number, index=index, count=count):
                    self._step_log.step = first + number
                    batch = stream.batch_at(number, begun=begun, step=first + number + 1, share=(index, count))
                case Save(number=number):
                    self._save()
                    gradients.saved(number)
                    continue
                case Pause(number=number):  # all workers are told so
                    self._stand(number)
                    self._recorder.begin("between two steps", self._step_log.step)
                    agreement.rejoin_group()
                    agreement.change_is_due()
                    agreement.between_steps()
                    agreement.part()
                    continue
                case StreamEnd(has_left=has_left):
                    self._have_others_left |= has_left
                    self._stand(dealt.limit)
                    self._recorder.begin("between two steps", self._step_log.step)
                    agreement.rejoin_group()
                    self._turn_of = None
                    if self._files.is_last_step(self._step_log.step):
                        self._stop()
                    return
                case None:
                    agreement.depart()
            self._step_log.open(batch, StreamPosition())
            gradients.behind, gradients.num_samples = None, sum(micro.num_samples for micro in batch.micros)
            yield batch
            if (
                self._plan.has_backup_workers and batch.chosen is None
            ):  # it was passed over, and nobody has waited for it
                self._step_log.leave(name)
                continue
            if gradients.is_sent and not self._step_log.is_committed(name):  # an error was caught in the loop
                self._step_log.leave(name)
                gradients.give_back()
                continue
            gradients.pass_over()
            if gradients.behind is not None:
                self._step_log.report({"behind": gradients.behind})
            self._step_log.close(name)
            gradients.noted()

    def _begin(self, stream: BatchStream, gradients: AsyncGradients) -> DealtStream | None:
        """Reach the servers; returns what is dealt: who comes later is told by them. None: that is over, and the others
        are in a later loop, or at the end. From then on members are apart."""
        name, first, limit, files = stream.source.name, self._step_log.step, stream.num_left(), self._files
        if self._agreement.is_newcomer:
            self._agreement.part()
            dealt, is_over = gradients.join(name)
            if not is_over:
                self._agreement.come()
                return dealt
            self._step_log.step = dealt.step + dealt.limit
            stream.stand_after(dealt.limit, begun=StreamPosition(dealt.epoch, dealt.position))
            if files.is_last_step(self._step_log.step):
                self._agreement.await_run_end()
            return None
        if files.max_steps is not None:
            limit = max(0, min(limit, files.max_steps - first))
        every = files.save_every
        saves = (limit + 1, limit + 1, 1) if every is None else (every - first % every, limit + 1, every)
        self._agreement.run(lambda: gradients.meet(index=starting_turn(self._everybody), size=self._everybody.size))
        self._agreement.part()
        begun = StreamPosition(stream.cursor.epoch, stream.cursor.position)
        dealt = DealtStream(
            stream=name,
            limit=limit,
            workers=self._agreement.ranks,
            saves=saves,
            step=first,
            epoch=begun.epoch,
            position=begun.position,
        )
        if self._plan.has_backup_workers:
            epochs, micros = stream.steps_of_epochs(begun), stream.num_micros(begun)
            dealt = DealtShares(**dealt.plain(), epochs=epochs, micros=micros)
        return dealt

    def _note_bequests(
        self, stream: BatchStream, gradients: AsyncGradients, *, begun: StreamPosition, first: int
    ) -> None:
        """Note the batches that count, and may be in the ledger of a lost worker alone, or in none."""
        for one in gradients.bequests:
            if one.stream == stream.source.name:  # who came later hears of earlier ones, too
                batch = stream.batch_at(one.number, begun=begun, step=first + one.number + 1)
                if self._plan.has_backup_workers:  # all have passed it over: it is in nobody's books
                    self._step_log.step, batch.chosen = first + one.number, ()
                    self._step_log.open(batch, StreamPosition())
                    self._step_log.close(batch.stream)
                    continue
                self._files.ledger.committed(batch, (), step=batch.step, skipped=one.is_skipped, is_whole=True)
        if gradients.bequests:
            gradients.bequests.clear()
            gradients.noted()

    def _stand(self, number: int) -> None:
        """All batches before this number are done, and their updates are here."""
        if self._turn_of is not None:
            stream, first, begun = self._turn_of
            self._step_log.step = first + number
            stream.stand_after(number, begun=begun)
