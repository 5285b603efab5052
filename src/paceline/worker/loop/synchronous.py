"""Synchronous steps: all workers agree on every step, and have equal weights after it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.plan import Plan
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.step_mode import StepMode
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.step.step_scope import StepScope

__all__ = ["Synchronous"]


class Synchronous(StepMode):
    """Every step is one transaction of all workers."""

    @staticmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """All workers take part in each step."""
        return StepScope(place=place, group=place.group, axes=place.axes, vote=place.consensus)

    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the stream's batches; what is due between two steps is done before and after each."""
        log, between = self._log, self._between
        steps = stream.steps(lambda: log.step + 1)
        while True:
            self._recorder.begin("between two steps", log.step)
            between.before_step()
            self._recorder.begin("waiting for data", log.step + 1)
            batch = next(steps, None)
            if batch is None:
                between.end_of_data()
                return
            if self._files.is_last_step(log.step):
                between.stop()
                return
            yield from between.hand_out(stream, batch)
            self._recorder.begin("between two steps", log.step)
            between.after_step()
