"""How a worker takes its steps: the one place where the loop and the worker meet a plan's mode.

There are three modes. `Synchronous` agrees on every step. `LocalRounds` lets replicas take steps by themselves and
agree at the end of a round. `Asynchronous` takes batches from servers and waits for no other replica. `step_mode_for`
chooses one when the worker is built.

A mode gives `scope` and `open`. Its other methods are hooks, called in this order, and do nothing by default:

- a stream: `begin_stream`, then `open`, which yields the batches and does what is due between two steps;
- a step: `before_step`, `before_optimizer`, `commit`, and `stepped` in the course of the commit;
- an operation of all workers: `before_operation`, `catch_up`, `averaged`, `before_save`;
- other events: `members_changed`, and `end` when the training function is over.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from paceline.comm.flight_recorder import FlightRecorder
from paceline.plan import Plan
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.step_log import StepLog
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.parts import WorkerParts
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.prepared_objects import PreparedObjects
from paceline.worker.step.step_scope import StepScope

__all__ = ["StepMode", "StepTaker", "StreamTerms"]


class StepTaker(Protocol):
    """What took a step of a round, and can take another on samples that a lost replica should have run."""

    def run_more(self, batch: StepBatch) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamTerms:
    """What a mode asks of a stream."""

    # How to find the replicas whose shares of a batch are all to be known. None: only this worker's own share is.
    replicas: Callable[[], list[int]] | None = None
    ledger_facts: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])  # the ledger notes them


class StepMode(Protocol):
    """How one worker takes its steps."""

    _plan: Plan
    _files: RunFiles
    _models: PreparedModels
    _prepared: PreparedObjects
    _scope: StepScope
    _consensus: Consensus
    _recorder: FlightRecorder
    _between: BetweenSteps
    _log: StepLog

    def __init__(self, parts: WorkerParts, between: BetweenSteps) -> None:
        self._plan, self._files, self._models = parts.plan, parts.files, parts.models
        self._prepared, self._scope = parts.prepared, parts.scope
        self._consensus, self._recorder = parts.place.consensus, parts.place.recorder
        self._between, self._log = between, between.log

    @staticmethod
    @abc.abstractmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """Which workers take part in the steps of the worker at this place."""

    # What a mode refuses.

    def check_prepared(self, thing: object) -> None:
        """Raise PlanError where an object that is to be prepared would mean something else in this mode."""

    def check_plain_loop(self) -> None:
        """Raise RuntimeError where only a stepper can take a step, and a plain loop over a batch cannot."""

    def require_common_step(self, what: str) -> None:
        """Raise RuntimeError where replicas have ended at different steps, so that `what` has no common one."""

    # A stream of batches.

    def begin_stream(self) -> StreamTerms:
        """A stream is about to be opened. All that prepared optimizers train is known now."""
        return StreamTerms()

    @abc.abstractmethod
    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the stream's batches, and do what is due between two steps."""

    # One step.

    def before_step(self, batch: StepBatch) -> None:
        """A gradient pass over a batch comes. A member may have been lost in what the loop does before its step."""
        self._between.refresh_share(batch)

    def before_optimizer(self, *, is_stepping: bool) -> None:
        """A prepared optimizer is about to step. `is_stepping`: a stepper calls it."""

    def commit(self, batch: StepBatch, by: StepTaker | None) -> None:
        """The step on a batch is over: write it into the step log. `by` took it; None: the plain loop did."""
        self._log.commit(batch)

    def stepped(self, batch: StepBatch, *, is_again: bool) -> None:
        """The step log counts a step. `is_again`: another optimizer has stepped on a batch that was counted before."""

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

    # Changes of the members, and the end.

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        self._between.share_anew()

    def end(self) -> None:
        """The training function is over: agree with the others on the last steps. All must come to it."""
