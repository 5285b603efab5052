"""Asynchronous updates: parameter servers hand out batches, and no replica waits for a step of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from paceline.comm.group import SingleWorkerGroup
from paceline.errors import PlanError
from paceline.plan import ParameterServer, Plan
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.async_batches import AsyncBatches
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.step_mode import StepMode, StepTaker, StreamTerms
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.parts import WorkerParts
from paceline.worker.step.step_scope import ReplicaVote, StepScope
from paceline.worker.topology.parallel_groups import single_worker_replicas

__all__ = ["Asynchronous"]


class Asynchronous(StepMode):
    """Each replica takes steps on the batches that servers hand out to it. `AsyncBatches` is the loop over them."""

    def __init__(self, parts: WorkerParts, between: BetweenSteps) -> None:
        super().__init__(parts, between)
        self._batches = AsyncBatches(
            parts, step_log=between.log, save=self._save, stop=self._stop, forget=between.streams.pop
        )

    @staticmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """Each worker takes its steps alone. With backup workers, several of them share a batch through the servers."""
        alone = SingleWorkerGroup()
        own = dataclasses.replace(place, group=alone, axes=single_worker_replicas(alone))
        return StepScope(
            place=own,
            group=own.group,
            axes=own.axes,
            vote=ReplicaVote(place.consensus),
            is_alone=not plan.has_backup_workers,
        )

    def check_prepared(self, thing: object) -> None:
        """Refuse schedulers: they count the steps of their own replica only."""
        if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            raise PlanError(
                f"worker.prepare() got a {type(thing).__name__} under ParameterServer(staleness=...) or (drop=...): "
                "each replica would count only its own batches. Set the rate from worker.step, which counts all: for "
                "group in optim.param_groups: group['lr'] = rate(worker.step), before step(batch); or use "
                "staleness=0 and drop=0."
            )

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where a replica has left a loop over batches before its end."""
        self._batches.require_common_step(what)

    def begin_stream(self) -> StreamTerms:
        """The ledger notes how many updates of others an update may be behind, where the plan limits that."""
        self.require_common_step("worker.batches()")
        bound = self._plan.sync.staleness if isinstance(self._plan.sync, ParameterServer) else None
        return StreamTerms(ledger_facts={"staleness": bound} if bound else {})

    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the batches that servers hand out to this worker."""
        return self._batches.batches(stream)

    def before_step(self, batch: StepBatch) -> None:
        """Nothing: servers hand the batches of lost members to others."""

    def commit(self, batch: StepBatch, by: StepTaker | None) -> None:
        """Give the step back to the servers first: after that no other worker takes it."""
        self._models.reducers.async_gradients.pass_over()
        batch.behind = self._models.reducers.async_gradients.behind
        super().commit(batch, by)

    @property
    def is_apart(self) -> bool:
        """Whether the loop over a stream is under way: replicas take different batches, and different numbers."""
        return self._batches.is_under_way

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
            self._batches.count_done()

    def end(self) -> None:
        """Leave the loop over batches, if it is still held open."""
        self._batches.leave()

    def _save(self) -> None:
        self.before_save()
        self._between.save(is_writer=True)

    def _stop(self) -> None:
        """Only this step's save counts, and no other worker is waited for."""
        self._between.stop(is_saved=self._files.is_save_due(self._log.step), awaits_save=False)
