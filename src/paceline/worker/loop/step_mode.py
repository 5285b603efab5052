"""How a worker takes its steps: the one place where the loop, the step log and the stepper meet a plan's mode.

There are three modes. `Synchronous` agrees on every step, `LocalRounds` lets replicas step by themselves and agree at
the end of a round, and `Asynchronous` takes batches from servers without waiting for others. `step_mode_for` chooses
one when the worker is built. Everything else calls the hooks below, in the order in which they stand here. A hook that
a mode does not override does nothing, because most modes have nothing to do there.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import WorkerGroup
from paceline.plan import ParameterServer, Plan
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.step_log import StepLog
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.step.gradient_pass import StepExecutor, StepVote
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["ReplicaVote", "StepMode", "StepScope", "StepTaker"]


class StepTaker(Protocol):
    """What took a step of a round, and can take another on samples that a lost replica should have run."""

    def run_more(self, batch: StepBatch) -> None: ...


class ReplicaVote:
    """The vote of a gradient pass in which other replicas take no part: it asks nothing of them.

    When something cannot wait, all workers of this replica learn so from the pass's step metadata.
    """

    def __init__(self, agreement: Consensus) -> None:
        self._agreement = agreement
        self.is_called = False  # to the other replicas

    @property
    def wants_change(self) -> bool:
        return self._agreement.is_urgent

    def change_is_due(self) -> None:
        self.is_called = True

    def vote(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepScope:
    """Which workers take part in one worker's steps."""

    place: WorkerContext  # the worker's place, as its steps see it
    group: WorkerGroup  # all that agree at the end of a gradient pass
    axes: ParallelGroups  # the groups of their replicas
    vote: StepVote


class StepMode(Protocol):
    """How one worker takes its steps."""

    is_alone: bool  # no other worker takes part in this one's steps
    steps_on_servers: bool  # and so no optimizer steps here
    skipped_by: str = "on all workers"  # for the warning about a step that is skipped
    _plan: Plan
    _everybody: WorkerGroup
    _models: PreparedModels
    _files: RunFiles
    _executor: StepExecutor
    _scope: StepScope
    _agreement: Consensus
    _recorder: FlightRecorder
    _between: BetweenSteps
    _log: StepLog

    def __init__(
        self,
        plan: Plan,
        scope: StepScope,
        *,
        everybody: WorkerGroup,
        models: PreparedModels,
        files: RunFiles,
        executor: StepExecutor,
    ) -> None:
        """`everybody`: all workers of the run. Call `attach` before the first stream is opened."""
        self._plan, self._everybody, self._models, self._files = plan, everybody, models, files
        self._executor, self._scope = executor, scope
        self.is_alone = False
        self._agreement, self._recorder = scope.place.agreement, scope.place.recorder
        self.steps_on_servers = isinstance(plan.sync, ParameterServer)

    @staticmethod
    @abc.abstractmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """Which workers take part in the steps of the worker at this place."""

    def attach(self, between: BetweenSteps) -> None:
        """Get what is due between two steps, and with it the streams and the step log."""
        self._between, self._log = between, between.log

    # A stream of batches.

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where replicas have ended at different steps, so that `what` has no common one."""

    def replicas(self) -> Callable[[], list[int]] | None:
        """How to find the replicas whose shares of a batch are all to be known; None: only the own share is."""
        return None

    def opened(self) -> None:
        """A stream was opened: all that prepared optimizers train is known."""

    def about_stream(self) -> dict[str, int]:
        """What the ledger says of a stream besides."""
        return {}

    @abc.abstractmethod
    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the stream's batches, and do what is due between two steps."""

    # One step.

    def check_plain_loop(self) -> None:
        """Raise RuntimeError where a step needs a stepper, and a plain loop cannot take it."""
        if self.steps_on_servers:
            raise RuntimeError(
                "a plain loop over a batch under ParameterServer(...): optimizers run on the servers, so optim.step() "
                "has nothing to do here. Write: step = worker.stepper(model, optim, loss), and in the loop over "
                "batches: loss = step(batch)"
            )

    def before_step(self, batch: StepBatch) -> None:
        """A gradient pass over a batch comes. A member may have been lost in what the loop does before its step."""
        stream = self._between.streams[batch.stream]
        if stream.is_dealt_anew:
            stream.redeal(batch)

    def before_optimizer(self, *, is_stepping: bool) -> None:
        """A prepared optimizer steps; `is_stepping`: a stepper calls it."""

    def before_commit(self, batch: StepBatch) -> None:
        """The step on a batch is over, and is about to be written into the ledger."""

    def stepped(self, batch: StepBatch) -> None:
        """The step log counts a step as committed here."""

    def stepped_again(self, batch: StepBatch) -> None:
        """Another optimizer has stepped on a batch that was committed before."""

    @property
    def waits(self) -> bool:
        """Whether committed steps wait for other replicas before they count in the ledger."""
        return False

    def after_commit(self, batch: StepBatch, by: StepTaker | None) -> None:
        """The step is committed; `by` took it, where that was a stepper."""

    # Operations that all workers do together.

    @property
    def is_apart(self) -> bool:
        """Whether replicas are at different steps now, so that each does operations by itself."""
        return False

    @property
    def has_left(self) -> bool:
        """Whether this replica has left a loop before its end, at a step that no other replica shares."""
        return False

    def before_operation(self) -> None:
        """An operation of all workers comes, which may look at what the last step brings."""

    def catch_up(self) -> None:
        """Get the weights that all others have; all must call it, in an operation."""

    def averaged(self) -> contextlib.AbstractContextManager[Any]:
        """Have the mean of all replicas' weights in the models meanwhile; all must call it, in an operation."""
        return contextlib.nullcontext()

    def before_save(self) -> None:
        """A checkpoint is about to be saved: have equal weights, and a step that is true of all streams."""

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        self._between.deal_anew()

    def leave(self) -> None:
        """The training function is over; so is a loop that is still held open."""

    def end(self) -> None:
        """Agree with the other replicas on the last steps; all must come to it at the same place."""
