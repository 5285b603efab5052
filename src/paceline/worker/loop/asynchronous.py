"""Asynchronous steps: parameter servers deal batches, and no replica waits for a step of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from paceline.comm.group import SingleWorkerGroup
from paceline.plan import ParameterServer, Plan
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.async_batches import AsyncBatches
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.step_mode import ReplicaVote, StepMode, StepScope
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.topology.parallel_groups import single_worker_replicas

__all__ = ["Asynchronous"]


class Asynchronous(StepMode):
    """Each replica takes steps on the batches that servers deal to it. `AsyncBatches` is the loop over them."""

    def __init__(self, plan: Plan, *args: Any, **options: Any) -> None:
        super().__init__(plan, *args, **options)
        self.is_alone = not plan.has_backup_workers

    @staticmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """Each worker takes its steps alone."""
        alone = SingleWorkerGroup()
        own = dataclasses.replace(place, group=alone, axes=single_worker_replicas(SingleWorkerGroup()))
        return StepScope(place=own, group=own.group, axes=own.axes, vote=ReplicaVote(place.agreement))

    def attach(self, between: BetweenSteps) -> None:
        """Build the loop over batches, which notes steps in this log."""
        super().attach(between)
        self._batches = AsyncBatches(
            self._plan,
            place=self._scope.place,
            everybody=self._everybody,
            models=self._models,
            step_log=between.log,
            files=self._files,
            save=self._save,
            stop=self._stop,
            forget=between.streams.pop,
        )

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where a replica has left a loop over batches before its end."""
        self._batches.require_common_step(what)

    def about_stream(self) -> dict[str, int]:
        """How many updates of others an update may be behind, where the plan says so."""
        bound = self._plan.sync.staleness if isinstance(self._plan.sync, ParameterServer) else None
        return {"staleness": bound} if bound else {}

    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the batches that servers deal to this worker."""
        return self._batches.batches(stream)

    def before_step(self, batch: StepBatch) -> None:
        """Nothing: servers deal the batches of lost members to others."""

    def before_commit(self, batch: StepBatch) -> None:
        """Give the step back to the servers first: after that no other worker takes it."""
        self._models.reducers.async_gradients.pass_over()
        batch.behind = self._models.reducers.async_gradients.behind

    @property
    def is_apart(self) -> bool:
        """Whether the loop over a stream is under way: replicas take different batches, and different numbers."""
        return self._batches.is_dealing

    @property
    def has_left(self) -> bool:
        """Whether this replica has left a loop before its end."""
        return self._batches.has_left

    def catch_up(self) -> None:
        """Get the weights that the last replicas in the loop have made."""
        self._batches.catch_up()

    def before_save(self) -> None:
        """Count all batches as done that are; no worker has one in hand."""
        if self.is_apart:
            self._batches.stand()

    def leave(self) -> None:
        """End the loop over batches, if it is still held open."""
        self._batches.leave()

    def _save(self) -> None:
        self.before_save()
        self._between.save(is_writer=True)

    def _stop(self) -> None:
        """Only this step's save counts, and no other worker is waited for."""
        self._between.stop(is_saved=self._files.is_save_due(self._log.step), awaits_save=False)
